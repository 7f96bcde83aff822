"""Structured outputs: whatever is sampled has the form asked for."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import pytest

from qkv_engine import Engine, RequestError, StructuredOutputs
from qkv_engine.sampling import guide
from qkv_engine.sandbox import Refusal, Sandbox

from ..doc_pages import ROOT

QUESTION = [{"role": "user", "content": "What is 4000+42?"}]
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
def test_a_schema_is_met(small_engine: Engine, schema: object):
    texts = sampled(small_engine, StructuredOutputs(json=schema), n=3)
    for text in texts:
        found = json.loads(text)
        assert set(found) == {"name", "tags", "size"} and len(found["name"]) <= 12
        assert set(found["tags"]) <= {"a", "b"} and 1 <= len(found["tags"]) <= 3 and 3 <= found["size"] <= 40
    assert len(set(texts)) > 1


def test_an_expression_a_choice_and_a_grammar_are_met(small_engine: Engine):
    for text in sampled(small_engine, StructuredOutputs(regex="(yes|no)[0-9]{1,3}!")):
        assert re.fullmatch("(yes|no)[0-9]{1,3}!", text)
    choices = ['"quoted"', "a b\n", "ä"]
    assert set(sampled(small_engine, StructuredOutputs(choice=choices), n=12)) <= set(choices)
    for text in sampled(small_engine, StructuredOutputs(grammar='start: "(" start ")" | /[a-z]/')):
        assert re.fullmatch(r"\(*[a-z]\)*", text) and text.count("(") == text.count(")")


def test_a_json_object_is_one(small_engine: Engine):
    brace = small_engine.tokenizer.encode("}")[0]
    assert set(sampled(small_engine, StructuredOutputs(json_object=True), logit_bias={brace: 100.0})) == {"{}"}


def test_reasoning_comes_before_the_form(demo_engine: Engine):
    wanted = StructuredOutputs(regex="[A-Z]{5}")
    options = ({}, {"structured_outputs": wanted}, {"structured_outputs": wanted, "separate_reasoning": False})
    plain, formed, raw = demo_engine.chat([QUESTION] * 3, [demo_engine.params(**each) for each in options])
    assert formed.reasoning == plain.reasoning and re.fullmatch("[A-Z]{5}", formed.text)
    assert re.fullmatch("[A-Z]{5}", raw.text)


def test_it_holds_beside_masks_biases_and_other_requests(small_engine: Engine):
    tokenizer = small_engine.tokenizer
    digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    biased = sampled(small_engine, StructuredOutputs(regex="[0-9]{3}"), logit_bias={digits[7]: 100.0})
    assert biased == ["777"] * 6
    allowed = sampled(
        small_engine, StructuredOutputs(regex="[0-9a-z]{1,9}x"), allowed_token_ids=[*digits, *tokenizer.encode("x"), 2]
    )
    assert all(re.fullmatch("[0-9x]{1,9}x", text) for text in allowed)
    wanted = StructuredOutputs(regex="[0-9]{2}")
    params = [small_engine.params(max_tokens=8), small_engine.params(structured_outputs=wanted, max_tokens=8)]
    plain, formed = small_engine.generate(["Hello", "Hello"], params)
    assert plain.text == small_engine.generate("Hello", params[0])[0].text and re.fullmatch("[0-9]{2}", formed.text)


def test_a_restart_finds_its_place_in_the_form_again(small_engine: Engine):
    wanted = StructuredOutputs(regex="([0-9]{4}-){20}end")
    params = small_engine.params(structured_outputs=wanted)
    whole = small_engine.generate("Hello", params)[0].text
    stream = small_engine.stream("Hello", params)
    for _ in range(20):
        next(stream)
    small_engine._loop.call(small_engine._started.core.recover)
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
def test_a_form_with_a_mistake_is_refused(small_engine: Engine, wanted: object, field: str):
    with pytest.raises(RequestError) as caught:
        small_engine.generate("Hello", small_engine.params(structured_outputs=wanted))
    assert caught.value.field == field


def test_a_form_ends_the_output_itself(small_engine: Engine):
    for other in ({"ignore_eos": True}, {"min_tokens": 5}):
        with pytest.raises(RequestError, match="where the output ends"):
            small_engine.params(structured_outputs=StructuredOutputs(regex="a"), **other)


def chain_of_references(number: int) -> dict[str, object]:
    definitions: dict[str, object] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(number)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{number}": {"type": "integer"}}}


def chain_of_rules(number: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(number)) + f'\nr{number}: "a"'


SLOW = r"start: A" + "\n" + r"A: /(.*a.*){9}/ & /(.*b.*){9}/ & ~/.*c.*/ & /[a-z]{0,900}/ & ~/(.*zz.*){6}/"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (StructuredOutputs(json=chain_of_references(1400)), "too deeply"),
        (StructuredOutputs(grammar=chain_of_rules(2750)), "too deeply"),
        (StructuredOutputs(grammar=SLOW), "within 1 s"),
        (StructuredOutputs(json={"$ref": "#"}), "no text has this form"),
        (StructuredOutputs(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "too deeply nested"),
    ],
)
def test_a_grammar_that_kills_or_stops_the_library_is_refused(small_engine: Engine, wanted: object, words: str):
    """Chains of references once ended the whole process, a slow grammar held a thread for seconds."""
    with pytest.raises(RequestError, match=words) as caught:
        small_engine.params(structured_outputs=wanted)
        small_engine.generate("Hello", small_engine.params(structured_outputs=wanted))
    assert caught.value.field == "structured_outputs" and "\n" not in str(caught.value)
    assert sampled(small_engine, StructuredOutputs(regex="ok")) == ["ok"] * 6


PROGRAM = """
from qkv_engine import Engine, RequestError, SamplingParams, StructuredOutputs
from tests.engine.test_structured_outputs import chain_of_references
with Engine(kv_memory="64MiB") as engine:
    for number in (10, 160):
        form = StructuredOutputs(json=chain_of_references(number))
        try:
            engine.generate("Hello", SamplingParams(max_tokens=1, structured_outputs=form))
            print(number, "is met")
        except RequestError as error:
            print(number, "is refused:", error)
"""


def test_a_grammar_that_passes_is_safe_on_smaller_stacks():
    words = ["sh", "-c", 'ulimit -s 512 && exec "$0" -c "$1"', sys.executable, PROGRAM]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 0, run.stderr
    met, refused = run.stdout.splitlines()
    assert met == "10 is met" and refused.startswith("160 is refused") and "too deeply" in refused


def test_deep_forms_that_people_write_are_met(small_engine: Engine):
    nested: dict[str, object] = {"type": "integer", "minimum": 0, "maximum": 9}
    for _ in range(50):
        nested = {"type": "object", "properties": {"x": nested}, "required": ["x"], "additionalProperties": False}
    for wanted in (StructuredOutputs(json=nested), StructuredOutputs(json=chain_of_references(100))):
        small_engine.generate("Hello", small_engine.params(structured_outputs=wanted, max_tokens=1))


def test_a_form_is_tried_in_a_process_once(small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    asked: list[bytes] = []
    ask = Sandbox.ask
    monkeypatch.setattr(Sandbox, "ask", lambda self, request: asked.append(request) or ask(self, request))
    for regex in ("[0-9]{2}x", "[0-9]{2}x", "[0-9]{3}x"):
        sampled(small_engine, StructuredOutputs(regex=regex))
    assert len(asked) == 2


def test_a_refusal_is_remembered_for_a_while(small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    asked: list[bytes] = []

    def refuse(self: Sandbox, request: bytes) -> bytes:
        asked.append(request)
        raise Refusal("it is odd", is_broken=False)

    def try_one(regex: str) -> None:
        params = small_engine.params(structured_outputs=StructuredOutputs(regex=regex))
        with pytest.raises(RequestError, match="it is odd") as caught:
            small_engine.generate("Hello", params)
        assert caught.value.field == "structured_outputs"

    monkeypatch.setattr(Sandbox, "ask", refuse)
    try_one("[3-7]{2}y")
    try_one("[3-7]{2}y")
    assert len(asked) == 1
    monkeypatch.setattr(guide, "MAX_REMEMBERED", len(small_engine._intake._grammars._trials))
    monkeypatch.setattr(guide, "REFUSED_SECONDS", 0.0)
    try_one("[3-7]{9}y")
    try_one("[3-7]{9}y")
    assert len(asked) == 3 and len(small_engine._intake._grammars._trials) == guide.MAX_REMEMBERED


def test_a_form_beyond_the_limits_in_the_middle_of_a_text_names_its_field(small_engine: Engine):
    wanted = StructuredOutputs(grammar="start: " + " | ".join(f'"x{i}"' for i in range(5000)))
    output = small_engine.generate("Hello", small_engine.params(structured_outputs=wanted))[0]
    assert output.finish_reason == "error" and output.error_field == "structured_outputs"
    assert output.error is not None and "items" in output.error and "\n" not in output.error


def test_parts_of_json_are_not_far_apart(small_engine: Engine):
    line_end = small_engine.tokenizer.encode("\n")[0]
    text = sampled(small_engine, StructuredOutputs(json=SCHEMA), n=1, logit_bias={line_end: 100.0})[0]
    assert set(json.loads(text)) == {"name", "tags", "size"} and "\n\n" in text and "\n\n\n" not in text


def test_an_event_loop_runs_on_while_a_grammar_is_compiled(small_engine: Engine):
    async def run() -> int:
        beats = 0
        params = small_engine.params(structured_outputs=StructuredOutputs(grammar=SLOW + " & /.{3,}/"))
        task = asyncio.ensure_future(anext(small_engine.generate_async([5, 6, 7], params)))
        while not task.done():
            beats += 1
            await asyncio.sleep(0.005)
        with pytest.raises(RequestError, match="within 1 s"):
            task.result()
        return beats

    assert asyncio.run(run()) > 20
