"""Tool calls in a text: however it is cut, the same text and calls come out."""

from __future__ import annotations

import json
import random

import pytest

from qkv_engine.serve.tools import ToolCallParser, writes_calls

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
