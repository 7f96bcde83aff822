"""Grammars of calls: they take what a family's template writes, and every text that they allow is a valid call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from qkv_engine import RequestError, StructuredOutputs
from qkv_engine.sampling.guide import Grammars, Guide
from qkv_engine.serve.tools.grammar import GrammarWriter
from qkv_engine.serve.tools.parser import ToolCallParser
from qkv_engine.serve.tools.schemas import Tools, closed, read_tools
from qkv_engine.text.find_marks import find_marks
from qkv_engine.text.reasoning import OutputText

from .family_models import VOCAB_SIZE, tokenizer_of
from .test_tools import Read
from .tool_writers import FORMS, Call

EOS = 2
ONE_CALL = ("gpt-oss", "gpt-oss-role")  # an answer ends with its call
WRITTEN = [name for name in FORMS if name not in ("mistral-ids", "gpt-oss-role", "glm-4.7")]
# Families whose marks are tokens, and some as if they were text.
KINDS = [*((name, True) for name in WRITTEN), *((name, False) for name in ("hermes", "glm", "gemma"))]
QUICK = (("hermes", True), ("gpt-oss", True), ("gemma", True), ("pythonic", True), ("glm", False))
kinds = pytest.mark.parametrize(
    ("name", "with_marks"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in KINDS]
)
MAYBE = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
PROPERTIES: dict[str, Any] = {
    "a": {"type": "integer", "minimum": 0, "maximum": 50, "description": "How many."},
    "s": {"type": "string", "maxLength": 8, "title": "Text"},
    "u": {"enum": ["C", "F", 1]},
    "b": {"type": "boolean"},
    "l": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 3},
    "o": {
        "type": "object",
        "properties": {
            "x": {"type": "string", "maxLength": 3},
            "y": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["x"],
    },
    "r": {"$ref": "#/$defs/Tree"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["a", "s"],
    "$defs": {"Tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}},
}
GIVEN = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
TOOLS = read_tools(GIVEN)
FULL: Call = (
    "f",
    {"a": 5, "s": "h <i", "u": "C", "b": True, "l": [1, -2], "o": {"x": "q", "y": None}, "r": {"kids": [{}]}},
)
VALID: list[Call] = [("f", {"a": 5, "s": "hi"}), ("g", {}), ("f", {"a": 0, "s": "", "l": [], "o": {"x": ""}}), FULL]
INVALID: list[Call] = [
    ("f", {"a": 51, "s": "hi"}),
    ("f", {"a": 5}),
    ("f", {"a": 5, "s": "x" * 9}),
    ("f", {"a": 5, "s": "hi", "u": "K"}),
    ("f", {"a": 5, "s": "hi", "u": 2}),
    ("f", {"a": 5, "s": "hi", "l": [1, 2, 3, 4]}),
    ("f", {"a": 5, "s": "hi", "o": {"y": None}}),
    ("f", {"a": 5, "s": "hi", "more": 1}),
    ("g", {"a": 1}),
    ("h", {}),
]


@cache
def grammars_of(name: str, with_marks: bool) -> Grammars:
    return Grammars(tokenizer_of(name, with_marks=with_marks), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    for name, with_marks in KINDS:
        grammars_of(name, with_marks).close()
    grammars_of.cache_clear()


def guide_of(name: str, kind: str, *, with_marks: bool = True, most: int = 4) -> Guide:
    """The guide of forced calls, or of text with calls in it."""
    family, tokenizer = FORMS[name].family, tokenizer_of(name, with_marks=with_marks)
    writer = GrammarWriter(tokenizer)
    start = family.forced(writer, TOOLS, most) if kind == "forced" else family.mixed(writer, TOOLS, most)
    guide = grammars_of(name, with_marks).compile(StructuredOutputs(grammar=writer.grammar(start)), "")
    marks = find_marks(tokenizer)
    return guide.begin(None if marks is None else marks.after([1]))


def takes(guide: Guide, ids: list[int]) -> bool:
    """Whether an output may be ``ids``, and end there."""
    for number, token_id in enumerate([*ids, EOS]):
        mask = guide.allowed(ids[:number], 0)
        if mask is not None and not mask[token_id]:
            return False
    return True


@kinds
@pytest.mark.parametrize("kind", ["forced", "mixed"])
def test_a_grammar_takes_valid_calls_alone(name: str, kind: str, with_marks: bool):
    tokenizer = tokenizer_of(name, with_marks=with_marks)
    guide = guide_of(name, kind, with_marks=with_marks)
    several = [] if name in ONE_CALL else [[*VALID[:1], ("g", {})]]
    for calls in [*([call] for call in VALID), *several]:
        ids = tokenizer.encode(FORMS[name].write(calls), add_special_tokens=False)
        assert takes(guide.begin(_marks(name, with_marks)), ids), FORMS[name].write(calls)
    for call in INVALID:
        ids = tokenizer.encode(FORMS[name].write([call]), add_special_tokens=False)
        assert not takes(guide.begin(_marks(name, with_marks)), ids), FORMS[name].write([call])


def _marks(name: str, with_marks: bool) -> Any:
    found = find_marks(tokenizer_of(name, with_marks=with_marks))
    return None if found is None else found.after([1])


@kinds
def test_text_may_stand_where_calls_are_not_forced(name: str, with_marks: bool):
    tokenizer, form = tokenizer_of(name, with_marks=with_marks), FORMS[name]
    call = form.write([VALID[0]])
    texts = ["Hello.", *([f"So\n{call}", f"So {call}\nok"] if form.takes_text else [])]
    if name in ONE_CALL:
        texts = ["<|channel|>final<|message|>Hello.", f"<|channel|>commentary<|message|>So.<|end|>{call}"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert takes(guide_of(name, "mixed", with_marks=with_marks), ids), text
        assert not takes(guide_of(name, "forced", with_marks=with_marks), ids), text


@kinds
def test_whatever_a_grammar_allows_is_a_valid_call(name: str, with_marks: bool):
    """Tokens drawn from all that are allowed, as a model without any sense would draw them."""
    tokenizer, form = tokenizer_of(name, with_marks=with_marks), FORMS[name]
    kept = [tokenizer.token_of(mark) for mark in form.family.marks]
    kept_ids = [each for each in kept if each in tokenizer.special_ids]
    first, marks = guide_of(name, "forced", with_marks=with_marks, most=3), _marks(name, with_marks)
    for seed in range(6):
        rng, ids, guide = random.Random(seed), list[int](), first.begin(marks)
        while not ids or ids[-1] != EOS:
            mask = guide.allowed(ids, 0)
            free = [*range(100, 200), _end_of_reasoning(marks)]  # within the reasoning
            allowed = free if mask is None else mask.nonzero()[:, 0].tolist()
            closers = [each for each in allowed if each in (EOS, _end_of_reasoning(marks))]
            ids.append(rng.choice(closers if closers and rng.random() < 0.3 else allowed))
            assert len(ids) < 3000
        text = _text(name, ids[:-1], with_marks, kept_ids)
        found, parser = Read(), ToolCallParser(form.family, Tools(TOOLS))
        found.add(parser.push(text, is_last=True))
        assert found.text.strip() == "" and 1 <= len(found.calls) <= 3, text
        for tool, arguments in found.decoded:
            assert _is_valid(arguments, closed(SCHEMA if tool == "f" else {"type": "object", "properties": {}})), text


def _end_of_reasoning(marks: Any) -> int | None:
    return getattr(marks, "end", getattr(marks, "closing", None))


def _text(name: str, ids: list[int], with_marks: bool, kept_ids: list[int]) -> str:
    tokenizer = tokenizer_of(name, with_marks=with_marks)
    marks = _marks(name, with_marks)

    def make() -> Any:
        return tokenizer.text_stream(True, (), kept_ids)

    output = OutputText(make) if marks is None else marks.output_text(make, None, 0)
    for token_id in ids:
        output.push(token_id)
    output.finish()
    return output.text


def _is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether ``value`` meets ``schema``, as far as the schemas of this file go."""
    if "$ref" in schema:
        return _is_valid(value, closed(SCHEMA["$defs"]["Tree"]))
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(_is_valid(value, each) for each in schema["anyOf"])
    kind = schema["type"]
    if kind == "object":
        members = (
            isinstance(value, dict) and set(schema.get("required", ())) <= value.keys() <= schema["properties"].keys()
        )
        return members and all(_is_valid(each, schema["properties"][key]) for key, each in value.items())
    if kind == "array":
        fits = isinstance(value, list) and len(value) <= schema.get("maxItems", len(value))
        return fits and all(_is_valid(each, schema["items"]) for each in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return type(value) is {"boolean": bool, "null": type(None)}[kind]


@pytest.mark.parametrize("is_strict", [True, False])
def test_keywords_that_nobody_knows_are_an_error_where_strict(is_strict: bool):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    function = {"name": "f", "parameters": schema, "strict": is_strict}
    tokenizer = tokenizer_of("hermes")
    writer = GrammarWriter(tokenizer)
    start = FORMS["hermes"].family.forced(writer, read_tools([{"type": "function", "function": function}]), 1)
    wanted = StructuredOutputs(grammar=writer.grammar(start))
    if is_strict:
        with pytest.raises(RequestError, match="uniqueItems"):
            grammars_of("hermes", True).compile(wanted, "")
    else:
        assert isinstance(grammars_of("hermes", True).compile(wanted, ""), Guide)


def test_a_free_answer_has_no_mask_before_its_reasoning_ends():
    """Channels: the analysis is free, then the header of the final message is forced, and then the form begins."""
    tokenizer = tokenizer_of("gpt-oss")
    guide = (
        grammars_of("gpt-oss", True)
        .compile(StructuredOutputs(json={"type": "integer"}), "")
        .begin(_marks("gpt-oss", True))
    )
    written = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>5"
    ids = tokenizer.encode(written, add_special_tokens=False)
    masks = [guide.allowed(ids[:number], 0) for number in range(len(ids) + 1)]
    counts = [None if mask is None else int(mask.sum()) for mask in masks]
    assert counts[:3] == [1, 2, 1] and counts[-7:-2] == [1] * 5 and set(counts[3:-7]) == {None}
    assert all(mask is None or mask[token] for mask, token in zip(masks, ids, strict=False))
    assert isinstance(masks[-1], torch.Tensor) and masks[-1][EOS]
    short = tokenizer.encode("<|channel|>final<|message|>12", add_special_tokens=False)
    assert takes(guide.begin(_marks("gpt-oss", True)), short)
