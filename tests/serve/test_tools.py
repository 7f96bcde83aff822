"""Tool calls in a text: however it is cut, the same text and calls come out."""

from __future__ import annotations

import json
import random

import pytest

from qkv_engine.serve.tools import ToolCallParser, for_template, writes_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "</x>"]}}\n</tool_call>'
TEXTS = [
    ("Hello", "Hello", 0),
    (CALL, "", 1),
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
    ("a < b, <tool>, <tool_cal", "a < b, <tool>, <tool_cal", 0),
    ("<tool_call>not JSON</tool_call> on", "<tool_call>not JSON</tool_call> on", 0),
    ('<tool_call>{"name": "add"', '<tool_call>{"name": "add"', 0),
    ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", 0),
]


@pytest.mark.parametrize(("text", "shown", "number"), TEXTS)
def test_calls_are_taken_out_of_the_text_however_it_is_cut(text: str, shown: str, number: int):
    rng = random.Random(3)
    for _ in range(20):
        parser, parts, calls, rest = ToolCallParser(), "", [], text
        while rest:
            size = rng.randint(1, max(1, len(text) // 5))
            part, found = parser.push(rest[:size], is_last=False)
            rest, parts, calls = rest[size:], parts + part, calls + found
        part, found = parser.push("", is_last=True)
        assert (parts + part).rstrip() == shown and len(calls + found) == parser.num_calls == number
        for index, call in enumerate(calls + found):
            assert call["index"] == index and call["function"]["name"] == "add"
            assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": [2, "</x>"]}


def test_a_call_that_is_not_held_back_would_be_seen():
    parser = ToolCallParser()
    assert parser.push("so <tool", is_last=False) == ("so ", []) and parser.push("box>", is_last=False) == (
        "<toolbox>",
        [],
    )


def test_the_form_is_that_of_the_template():
    assert writes_calls("...<tool_call>...</tool_call>...") and not writes_calls("{{ messages }}")
    assert not writes_calls(None)


@pytest.mark.parametrize(
    ("sent", "given"),
    [('{"a": {"b": [1]}}', {"a": {"b": [1]}}), ("", {}), ({"a": 1}, {"a": 1}), ("no JSON", "no JSON"), ("[1]", "[1]")],
)
def test_a_template_gets_arguments_as_objects_and_no_null(sent: object, given: object):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": sent}}
    (message,) = for_template([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"] == [call | {"function": {"name": "add", "arguments": given}}]
    assert message["content"] == "" and call["function"]["arguments"] is sent


def test_malformed_calls_are_the_template_s_to_refuse():
    for calls in (None, "x", 1, [], [1, "x", {}, {"function": "x"}, {"function": {}}, {"function": {"arguments": 1}}]):
        (message,) = for_template([{"role": "assistant", "content": "Hi", "tool_calls": calls}])
        assert message["tool_calls"] == calls and message["content"] == "Hi"
