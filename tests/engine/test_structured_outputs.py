"""Structured outputs: whatever is sampled has the form asked for."""

from __future__ import annotations

import json
import re

import pytest

from qkv_engine import Engine, RequestError, StructuredOutputs

QUESTION = [{"role": "user", "content": "What is 47*86?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 3, "maximum": 40},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def sampled(engine: Engine, wanted: StructuredOutputs, prompt: object = "Hello", **changes: object) -> list[str]:
    """Texts of random completions that ended by themselves."""
    options = {"n": 6, "temperature": 3.0, "seed": 4, "max_tokens": 400, "structured_outputs": wanted, **changes}
    output = next(iter(engine.stream(prompt, engine.params(**options, output_kind="final_only"))))
    assert {completion.finish_reason for completion in output.outputs} == {"stop"}
    return [completion.text for completion in output.outputs]


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_schema_is_met(demo_engine: Engine, schema: object):
    texts = sampled(demo_engine, StructuredOutputs(json=schema), n=3)
    for text in texts:
        found = json.loads(text)
        assert set(found) == {"name", "tags", "size"} and len(found["name"]) <= 12
        assert set(found["tags"]) <= {"a", "b"} and 1 <= len(found["tags"]) <= 3 and 3 <= found["size"] <= 40
    assert len(set(texts)) > 1


def test_an_expression_a_choice_and_a_grammar_are_met(demo_engine: Engine):
    for text in sampled(demo_engine, StructuredOutputs(regex="(yes|no)[0-9]{1,3}!")):
        assert re.fullmatch("(yes|no)[0-9]{1,3}!", text)
    choices = ['"quoted"', "a b\n", "ä"]
    assert set(sampled(demo_engine, StructuredOutputs(choice=choices), n=12)) <= set(choices)
    for text in sampled(demo_engine, StructuredOutputs(grammar='start: "(" start ")" | /[a-z]/')):
        assert re.fullmatch(r"\(*[a-z]\)*", text) and text.count("(") == text.count(")")


def test_a_json_object_is_one(demo_engine: Engine):
    brace = demo_engine.tokenizer.encode("}")[0]
    assert set(sampled(demo_engine, StructuredOutputs(json_object=True), logit_bias={brace: 100.0})) == {"{}"}


def test_reasoning_comes_before_the_form(demo_engine: Engine):
    plain = demo_engine.chat(QUESTION)
    wanted = StructuredOutputs(regex="[A-Z]{5}")
    formed = demo_engine.chat(QUESTION, demo_engine.params(structured_outputs=wanted))
    assert formed.reasoning == plain.reasoning and re.fullmatch("[A-Z]{5}", formed.text)
    raw = demo_engine.params(structured_outputs=wanted, separate_reasoning=False)
    assert re.fullmatch("[A-Z]{5}", demo_engine.chat(QUESTION, raw).text)


def test_it_holds_beside_masks_biases_and_other_requests(demo_engine: Engine):
    tokenizer = demo_engine.tokenizer
    digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    biased = sampled(demo_engine, StructuredOutputs(regex="[0-9]{3}"), logit_bias={digits[7]: 100.0})
    assert biased == ["777"] * 6
    allowed = sampled(
        demo_engine, StructuredOutputs(regex="[0-9a-z]{1,9}x"), allowed_token_ids=[*digits, *tokenizer.encode("x"), 2]
    )
    assert all(re.fullmatch("[0-9x]{1,9}x", text) for text in allowed)
    wanted = StructuredOutputs(regex="[0-9]{2}")
    params = [demo_engine.params(max_tokens=8), demo_engine.params(structured_outputs=wanted, max_tokens=8)]
    plain, formed = demo_engine.generate(["Hello", "Hello"], params)
    assert plain.text == demo_engine.generate("Hello", params[0])[0].text and re.fullmatch("[0-9]{2}", formed.text)


def test_a_restart_finds_its_place_in_the_form_again(demo_engine: Engine):
    wanted = StructuredOutputs(regex="([0-9]{4}-){20}end")
    params = demo_engine.params(structured_outputs=wanted)
    whole = demo_engine.generate("Hello", params)[0].text
    stream = demo_engine.stream("Hello", params)
    for _ in range(20):
        next(stream)
    demo_engine._loop.call(demo_engine._started.core.recover)
    *_, last = stream
    assert last.text == whole and re.fullmatch(wanted.regex, whole)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (StructuredOutputs(), "structured_outputs"),
        (StructuredOutputs(regex="a", json_object=True), "structured_outputs"),
        (StructuredOutputs(choice=[]), "structured_outputs.choice"),
        (StructuredOutputs(choice="yes"), "structured_outputs.choice"),
        (StructuredOutputs(regex=""), "structured_outputs.regex"),
        (StructuredOutputs(regex="x" * 70_000), "structured_outputs.regex"),
        (StructuredOutputs(json={"a": object()}), "structured_outputs.json"),
        (StructuredOutputs(json="{"), "structured_outputs"),
        (StructuredOutputs(json={"type": "nope"}), "structured_outputs"),
        (StructuredOutputs(regex="(a"), "structured_outputs"),
        (StructuredOutputs(grammar="start: other"), "structured_outputs"),
        ("json", "structured_outputs"),
    ],
)
def test_a_form_with_a_mistake_is_refused(demo_engine: Engine, wanted: object, field: str):
    with pytest.raises(RequestError) as caught:
        demo_engine.generate("Hello", demo_engine.params(structured_outputs=wanted))
    assert caught.value.field == field


def test_a_form_ends_the_output_itself(demo_engine: Engine):
    for other in ({"ignore_eos": True}, {"min_tokens": 5}):
        with pytest.raises(RequestError, match="where the output ends"):
            demo_engine.params(structured_outputs=StructuredOutputs(regex="a"), **other)
