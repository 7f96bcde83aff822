"""Tool calls in a text, family by family: what was written comes back however the text is cut, and nothing else."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest

from qkv_engine.serve.fair_threads import FairThreads
from qkv_engine.serve.tools.families import FAMILIES, HERMES, find_family
from qkv_engine.serve.tools.family import CallFamily
from qkv_engine.serve.tools.history import for_template
from qkv_engine.serve.tools.parser import CallDelta, ToolCallParser
from qkv_engine.serve.tools.schemas import Tools, as_json, read_tools, types_of, without_remarks

from .tool_writers import FORMS, NAMES, Call, Form, Writer, tools_for

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "</x>"]}}\n</tool_call>'
ALL = Tools(read_tools([{"type": "function", "function": {"name": name}} for name in NAMES]))
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{type(family).__name__}-{family.marks[:1]}")


class Read:
    """What a parser has found: the text, and name and arguments of each call."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[list[str]] = []
        self.ids: list[str] = []

    def add(self, found: Iterable[str | CallDelta]) -> None:
        for each in found:
            if isinstance(each, str):
                self.text += each
                continue
            if each.name:
                assert each.number == len(self.calls) and each.call_id not in self.ids
                self.calls.append([each.name, ""])
                self.ids.append(each.call_id)
            assert each.number == len(self.calls) - 1
            self.calls[-1][1] += each.arguments

    @property
    def decoded(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(family: CallFamily, tools: Tools, pieces: Iterable[str], *, is_last: bool = True) -> Read:
    parser, found = ToolCallParser(family, tools), Read()
    for piece in pieces:
        found.add(parser.push(piece, is_last=False))
    if is_last:
        found.add(parser.push("", is_last=True))
    assert parser.num_calls == len(found.calls)
    return found


def cut(rng: random.Random, text: str) -> list[str]:
    ends = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 9)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@forms
@pytest.mark.parametrize("most", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_fuzzed_calls_come_back(form: Form, most: int):
    family, number, seed = form.family, 0, 0
    while number < most:
        writer = Writer(seed, form.own)
        calls = writer.calls()
        text = form.write(calls)
        shown = ""
        if form.takes_text and writer.rng.random() < 0.5:
            shown = writer.text()
            text = f"{shown}\n{text}\n"
        found = read(family, Tools(read_tools(tools_for(calls))), cut(writer.rng, text))
        assert (found.text, found.decoded) == (shown, calls), text
        number, seed = number + len(calls), seed + 1


@forms
@pytest.mark.parametrize("number", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_a_stream_cut_anywhere_is_a_prefix(form: Form, number: int):
    for seed in range(number):
        writer = Writer(seed, form.own)
        calls, shown = writer.calls(), writer.text() if form.takes_text else ""
        text, tools = f"{shown}{form.write(calls)}", Tools(read_tools(tools_for(calls)))
        whole, parser, so_far = read(form.family, tools, [text]), ToolCallParser(form.family, tools), Read()
        assert (whole.text, whole.decoded) == (shown, calls)
        for end in range(len(text)):
            so_far.add(parser.push(text[end], is_last=False))
            assert whole.text.startswith(so_far.text)
            for number, (name, arguments) in enumerate(so_far.calls):
                assert whole.calls[number][0] == name and whole.calls[number][1].startswith(arguments)
                is_last = number == len(so_far.calls) - 1
                assert is_last or whole.calls[number][1] == arguments
            if end % 7 == 0:  # an answer that ends here has lost nothing, and has no call more
                ended = read(form.family, tools, [text[: end + 1]])
                assert ended.text.startswith(so_far.text)
                assert [name for name, _ in ended.calls] == [name for name, _ in whole.calls[: len(ended.calls)]]
                for (_, early), (_, late) in zip(so_far.calls, ended.calls, strict=False):
                    assert late.startswith(early)
        so_far.add(parser.push("", is_last=True))
        assert (so_far.text, so_far.calls) == (whole.text, whole.calls)


@forms
def test_arguments_are_streamed_before_the_call_ends(form: Form):
    calls: list[Call] = [("weather", {"city": "Rome " * 50, "days": 3})]
    text, tools = form.write(calls), Tools(read_tools(tools_for(calls)))
    parser, sizes = ToolCallParser(form.family, tools), []
    for char in text:
        sizes.append(
            sum(len(each.arguments) for each in parser.push(char, is_last=False) if isinstance(each, CallDelta))
        )
    assert sum(size > 0 for size in sizes) > 200 and max(sizes) < 20


@forms
def test_other_text_is_no_call(form: Form):
    """Text of other families, JSON and code, of which nothing is a call of this one."""
    texts = [
        "",
        " \n",
        "Hello.\n\n  Bye \n",
        '{"name": "Bob", "parameters": {}}',
        "[1, 2]",
        "[weather]",
        "[f(x=1)]",
        "<",
        "[TOOL_",
    ]
    texts += [
        "  [x for x in y]",
        '{"a": 1}',
        "weather(city=1)",
        "<tool_call",
        "a <tool_ b",
        '{"name": "weather"',
        "{",
        "<|",
    ]
    texts += [other.write([("weather", {"city": "x"})]) for other in FORMS.values() if not _is_like(form, other)]
    for text in texts:
        for pieces in ([text], list(text)):
            found = read(form.family, ALL, pieces)
            assert (found.text, found.calls) == (text, []), text


def _is_like(form: Form, other: Form) -> bool:
    """Whether the family of one reads what the other writes, too."""
    return (
        form.family is other.family
        or {"[TOOL_CALLS]"} <= {form.family.marks[:1], *other.family.marks[:1]}
        or (form.family.marks[:1] == other.family.marks[:1] == ("[TOOL_CALLS]",))
    )


@forms
@pytest.mark.parametrize("number", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_broken_calls_lose_nothing(form: Form, number: int):
    """A call with a character taken out or put in: the parser ends, and no text vanishes but marks and white space."""
    for seed in range(number):
        writer = Writer(seed, form.own)
        calls = writer.calls(2)
        text, at = form.write(calls), 0
        at = writer.rng.randrange(len(text))
        text = text[:at] + writer.rng.choice(["", "<", '"', "}", "\\", "x"]) + text[at + writer.rng.randint(0, 1) :]
        tools = Tools(read_tools(tools_for(calls)))
        whole = read(form.family, tools, [text])
        byte_by_byte = read(form.family, tools, list(text))
        assert (whole.text, whole.calls) == (byte_by_byte.text, byte_by_byte.calls)
        assert whole.calls or whole.text == text


HOSTILE = [
    *("[" * 25_000, '{"a":' * 5_000, "<tool_call>" * 12_500, "\n" * 125_000, '"' * 75_000, "\\" * 75_000),
    *("[TOOL_CALLS][" * 5_000, '[TOOL_CALLS]weather[ARGS]{"a":"' + "x" * 250_000, "</parameter" * 12_500),
    '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 5_000,
    '<tool_call>{"name": "weather", "arguments": {"a": "' + "\\ud83d" * 25_000,
    '<tool_call>{"arguments": {"a": "' + "y" * 250_000,
    "<tool_call>\n<function=weather>\n<parameter=a>\n" + "\n</parameter" * 20_000,
    "<tool_call>weather<arg_key>a</arg_key><arg_value>" + "</arg_valu" * 25_000,
    "<tool_call>" + "n" * 250_000,
    *("[weather(a=" + "[" * 25_000, "[weather(a='" + "\\" * 75_001, "[weather(" + "a" * 125_000),
    *("<|tool_call>call:weather{a:" + "{x:" * 12_500, '<|tool_call>call:weather{a:<|"|>' + '<|"|' * 25_000),
    '{"name": "weather", "parameters": {"a": ' + "1" * 125_000,
    "<|start|>assistant<|channel|>commentary to=functions.weather" + " x" * 75_000,
]


@families
def test_hostile_text_takes_linear_time(family: CallFamily):
    """Megabytes without an end, and deep nesting: whole or in small pieces, no recursion and no quadratic time."""
    began = time.process_time()
    for text in HOSTILE:
        found = read(family, ALL, [text])
        assert sum(len(arguments) for _, arguments in found.calls) + len(found.text) <= 7 * len(text)
    pieces = read(family, ALL, (HOSTILE[-1][start : start + 16] for start in range(0, len(HOSTILE[-1]), 16)))
    assert pieces.text == read(family, ALL, [HOSTILE[-1]]).text
    assert time.process_time() - began < 10  # seconds; under 1 on an idle core, minutes where it is quadratic


TEXTS = [
    ("Hello", "Hello", 0),
    (CALL, "", 1),
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
    (f"Let me see.\n{CALL}\nSo.", "Let me see.\nSo.", 1),
    (CALL.replace("}}\n", "}}}\n"), "", 1),
    (CALL.replace("\n</tool_call>", ""), "", 1),
    ("a < b, <tool>, <tool_cal", "a < b, <tool>, <tool_cal", 0),
    ("<tool_call>not JSON</tool_call> on", "<tool_call>not JSON</tool_call> on", 0),
    (f"<tool_call>{CALL}", "<tool_call>", 1),
    ('<tool_call>{"name": "add"', '<tool_call>{"name": "add"', 0),
    ('<tool_call>{"name": "add", "arguments": [1]}', '<tool_call>{"name": "add", "arguments": [1]}', 0),
    ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', 0),
    ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", 0),
]


@pytest.mark.parametrize(("text", "shown", "number"), TEXTS)
def test_calls_are_taken_out_of_the_text_however_it_is_cut(text: str, shown: str, number: int):
    rng = random.Random(3)
    for pieces in (cut(rng, text) for _ in range(20)):
        found = read(HERMES, ALL, pieces)
        assert (found.text, found.decoded) == (shown, [("add", {"a": 1, "b": [2, "</x>"]})] * number)


def test_a_call_that_breaks_off_keeps_its_beginning():
    broken = '<tool_call>{"name": "add", "arguments": {"a": "x", "b": 1!}}</tool_call>'
    found = read(HERMES, ALL, [broken])
    assert found.calls == [["add", '{"a":"x","b":1']] and found.text == "!}}</tool_call>"
    ended = read(HERMES, ALL, ['<tool_call>{"name": "add", "arguments": {"a": "x'])
    assert ended.calls == [["add", '{"a":"x']] and ended.text == ""


def test_halves_of_characters_and_control_characters_are_made_whole():
    text = (
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d\\ude42 \\ud83d \\ude42 \\ud83d\\u0041\n\t"}}</tool_call>'
    )
    ((_, arguments),) = read(HERMES, ALL, list(text)).decoded
    assert arguments == {"a": "🙂 \ufffd \ufffd \ufffdA\n\t"}


def test_calls_after_the_first_are_left_out_where_one_is_asked_for():
    parser, found = ToolCallParser(HERMES, ALL, calls_once=True), Read()
    found.add(parser.push(f"{CALL}{CALL}{CALL} x", is_last=True))
    assert len(found.calls) == 1 and found.text == " x"


def test_ids_are_those_that_templates_take():
    ids = {form: read(FORMS[form].family, ALL, [FORMS[form].write([("a", {})])]).ids[0] for form in FORMS}
    assert all(len(each) == 9 and each.isalnum() for form, each in ids.items() if form.startswith("mistral"))
    assert all(each.startswith("call_") for form, each in ids.items() if not form.startswith("mistral"))


def test_the_form_is_that_of_the_template():
    assert len({id(form.family) for form in FORMS.values()}) == len(FAMILIES)
    assert find_family("{{ messages }}") is None and find_family(None) is None


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, "5"),
        (" 5\n", {"type": "number"}, "5"),
        ("True", {"type": "boolean"}, "true"),
        ("None", {"type": ["string", "null"]}, "null"),
        ("None", {"type": "string"}, '"None"'),
        ("five", {"type": "integer"}, '"five"'),
        ("5", {}, "5"),
        ("five", {}, '"five"'),
        ('"five"', {}, '"\\"five\\""'),
        ('{"a": [1]}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, '{"a": [1]}'),
        ("[" * 5000, {"type": "array"}, json.dumps("[" * 5000)),
        ("b", {"enum": ["a", "b", 1]}, '"b"'),
        ("1", {"enum": ["a", "b", 1]}, "1"),
        ("1", {"$ref": "#/$defs/N"}, "1"),
        ("1", {"$ref": "#/$defs/Loop"}, "1"),
        ("x", {"const": "x"}, '"x"'),
    ],
)
def test_plain_text_becomes_json_of_its_type(text: str, schema: dict[str, Any], expected: str):
    root = {"$defs": {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    assert as_json(text, types_of(schema, root)) == expected


def test_references_that_branch_take_no_time():
    """As a tree this schema would have 2 ** 100 leaves."""
    root: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/d{n + 1}"}] * 2} for n in range(100)}
    root |= {"d100": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/loop"}, {"type": "null"}]}}
    assert types_of({"$ref": "#/d0"}, root) == {"integer"} and types_of({"$ref": "#/loop"}, root) == {"null"}


def test_remarks_are_no_part_of_a_grammar_but_names_are():
    schema = {"title": "x", "properties": {"title": {"type": "string", "description": "x"}}, "enum": [{"title": 1}]}
    assert without_remarks(schema) == {"properties": {"title": {"type": "string"}}, "enum": [{"title": 1}]}


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
    ],
)
def test_a_template_gets_arguments_as_objects_and_no_null(sent: object, given: object):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": sent}}
    (message,) = for_template([{"role": "assistant", "content": None, "tool_calls": [call]}], FairThreads())
    assert message["tool_calls"] == [call | {"function": {"name": "add", "arguments": given}}]
    assert message["content"] == "" and call["function"]["arguments"] is sent


def test_malformed_calls_are_the_template_s_to_refuse():
    for calls in (None, "x", 1, [], [1, "x", {}, {"function": "x"}, {"function": {}}, {"function": {"arguments": 1}}]):
        (message,) = for_template([{"role": "assistant", "content": "Hi", "tool_calls": calls}], FairThreads())
        assert message["tool_calls"] == calls and message["content"] == "Hi"
