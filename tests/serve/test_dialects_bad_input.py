"""Malformed bodies of the Responses and the Messages API: an error in the dialect's form that names the field."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from qkv_engine.serve.dialects.messages_body import read_messages
from qkv_engine.serve.dialects.responses_body import read_responses
from qkv_engine.serve.errors import ApiError, last_events

from .running import HELLO, Running

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
NO_BODIES = (b"", b"{", b"nope", b"[]", b"1", b"\x00", b'{"input": "\xff"}', b'{"x": ' + b"[" * 8000)


def openai_error(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def messages_error(response: Any) -> dict[str, str]:
    found = response.json()
    assert set(found) == {"type", "error", "request_id"} and found["type"] == "error" and found["error"]["message"]
    return found["error"]


def asked(**fields: object) -> dict[str, object]:
    return {"input": "Hi", "max_output_tokens": 1, **fields}


def told(**fields: object) -> dict[str, object]:
    return {"messages": HELLO, "max_tokens": 1, **fields}


def said(*content: object, role: str = "user") -> dict[str, object]:
    return told(messages=[{"role": role, "content": list(content)}])


@pytest.mark.parametrize("body", NO_BODIES)
def test_what_is_no_body_is_a_400(server: Running, body: bytes):
    answer = server.http.post(RESPONSES, content=body, headers=JSON)
    assert answer.status_code == 400 and openai_error(answer)["type"] == "invalid_request_error"
    for path in (MESSAGES, COUNT):
        answer = server.http.post(path, content=body, headers=JSON)
        assert answer.status_code == 400 and messages_error(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"input": None}, "input"),
        ({"input": 1}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": 1}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input[0].content[0].type"),
        (asked(instructions=1), "instructions"),
        (asked(max_output_tokens=0), "max_output_tokens"),
        (asked(max_output_tokens=9000), "max_output_tokens"),
        (asked(temperature=-1), "temperature"),
        (asked(input="12 " * 9000), "input"),
        (asked(background=True), "background"),
        (asked(conversation="conv_1"), "conversation"),
        (asked(conversation={"id": "conv_1"}), "conversation"),
        (asked(prompt={"id": "pmpt_1"}), "prompt"),
        (asked(context_management=[{"type": "compaction"}]), "context_management"),
        (asked(moderation={"model": "x"}), "moderation"),
        (asked(truncation="auto"), "truncation"),
        (asked(top_logprobs=2), "top_logprobs"),
        (asked(include=["message.output_text.logprobs"]), "include"),
        (asked(tools=[{"type": "web_search"}]), "tools[0].type"),
        (asked(tools=[{"type": "function"}]), "tools[0].name"),
        (asked(tools=[TOOL, TOOL | {"parameters": 1}]), "tools[1].parameters"),
        (asked(tools=[TOOL], tool_choice={"type": "web_search"}), "tool_choice"),
        (asked(tools=[TOOL], tool_choice=1), "tool_choice"),
        (asked(text={"format": {"type": "xml"}}), "text.format.type"),
        (asked(text={"format": {"type": "json_schema", "name": "x"}}), "text.format.schema"),
        (asked(text={"format": {"type": "json_schema", "schema": {"type": "nope"}}}), "text.format"),
        (asked(text={"format": {"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}}), "text.format.schema"),
        (asked(metadata={"a": 1}), "metadata[...]"),
        (asked(previous_response_id="resp_x"), "previous_response_id"),
        (asked(kv_floor="int3"), "kv_floor"),
        (asked(stream="yes"), "stream"),
        (asked(chat_template_kwargs={"tools": 1}), "chat_template_kwargs"),
    ],
)
def test_a_malformed_response_names_its_field(server: Running, body: dict[str, object], param: str | None):
    answer = server.post(body, RESPONSES)
    error = openai_error(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert "Traceback" not in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "`messages`"),
        ({"messages": HELLO}, "`max_tokens`"),
        (told(messages="Hi"), "messages"),
        (told(messages=[]), "messages"),
        (told(messages=[1]), "messages[0]"),
        (told(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
        (told(messages=[{"role": "user"}]), "messages[0]"),
        (told(messages=[{"role": "user", "content": []}]), "messages[0].content"),
        (told(messages=[*HELLO, {"role": "assistant", "content": "So"}]), "messages[1].role"),
        (told(messages=[{"role": "user", "content": "12 " * 9000}]), "messages"),
        (said(1), "messages[0].content[0]"),
        (said({"text": "x"}), "messages[0].content[0]"),
        (said({"type": "text"}), "messages[0].content[0].text"),
        (said({"type": "text", "text": "x"}, IMAGE), "messages[0].content[1].type"),
        (said({"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages[0].content[0].type"),
        (said({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (
            said({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}),
            "messages[0].content[0].content[0].type",
        ),
        (said({"type": "tool_use", "id": "1", "name": "f"}, role="assistant"), "messages[0].content[0].input"),
        (said({"type": "tool_use", "name": "f", "input": {}}, role="assistant"), "messages[0].content[0].id"),
        (
            said({"type": "tool_use", "id": "1", "name": "f", "input": "x"}, role="assistant"),
            "messages[0].content[0].input",
        ),
        (said({"type": "thinking"}, role="assistant"), "messages[0].content[0].thinking"),
        (said({"type": "tool_result", "tool_use_id": "1"}, role="assistant"), "messages[0].content[0].type"),
        (told(system=1), "system"),
        (told(system=[IMAGE]), "system[0].type"),
        (told(max_tokens=0), "max_tokens"),
        (told(max_tokens="1"), "max_tokens"),
        (told(temperature=-1), "temperature"),
        (told(stop_sequences=[""]), "stop_sequences"),
        (told(stop_sequences=[1]), "stop_sequences[0]"),
        (told(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
        (told(tools=[{"name": "f"}]), "tools[0].input_schema"),
        (told(tools=[{"input_schema": {}}]), "tools[0]"),
        (told(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "some"}), "tool_choice.type"),
        (told(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "tool"}), "tool_choice.name"),
        (told(thinking={"type": "much"}), "thinking.type"),
        (told(output_config={"format": {"type": "xml"}}), "output_config.format.type"),
        (told(output_config={"format": {"type": "json_schema", "schema": {"type": "nope"}}}), "output_config.format"),
        (told(mcp_servers=[{"url": "x"}]), "mcp_servers"),
        (told(container="x"), "container"),
        (told(kv_floor="int3"), "kv_floor"),
        (told(stream="yes"), "stream"),
    ],
)
def test_a_malformed_message_names_its_field(server: Running, body: dict[str, object], field: str):
    answer = server.post(body, MESSAGES)
    error = messages_error(answer)
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert field in error["message"], error
    assert "Traceback" not in error["message"] and len(error["message"]) < 400


def test_models_methods_and_paths_below_have_the_dialect_s_form(server: Running):
    assert messages_error(server.post(told(model="claude"), MESSAGES))["type"] == "not_found_error"
    assert openai_error(server.post(asked(model="gpt"), RESPONSES))["code"] == "model_not_found"
    assert server.http.get(MESSAGES).status_code == 405 and messages_error(server.http.get(MESSAGES))
    batches = server.post({}, f"{MESSAGES}/batches")
    assert batches.status_code == 404 and f"send the messages to {MESSAGES}" in messages_error(batches)["message"]
    for path, instead in (("compact", RESPONSES), ("input_tokens", "/tokenize")):
        refused = server.post({}, f"{RESPONSES}/{path}")
        assert refused.status_code == 405 and instead in openai_error(refused)["message"]
    assert openai_error(server.http.get(f"{RESPONSES}/resp_x?stream=true"))["param"] == "stream"
    assert openai_error(server.post({}, f"{RESPONSES}x"))["message"].startswith("Not Found")


def test_unknown_fields_and_nulls_are_ignored(server: Running):
    nulls = ("tools", "tool_choice", "stream", "temperature", "metadata", "kv_floor", "chat_template_kwargs")
    more = {"made_up": [{}], "service_tier": "auto", **dict.fromkeys(nulls)}
    only = ("instructions", "previous_response_id", "store", "text", "reasoning", "include", "background", "prompt")
    assert server.post(asked(**more, **dict.fromkeys(only)), RESPONSES).status_code == 200
    only = ("system", "thinking", "stop_sequences", "output_config", "mcp_servers", "container")
    assert server.post(told(**more, **dict.fromkeys(only)), MESSAGES).status_code == 200


def test_a_stream_that_is_ended_from_outside_has_the_dialect_s_error():
    lost = ApiError(503, "lost", code="replica_lost", param="input")
    *_, done = last_events(lost, {"path": "/v1/chat/completions"}).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    for path in (MESSAGES, RESPONSES):
        name, data = last_events(lost, {"path": path}).decode().strip().split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and event["type"] == "error"
        assert event.get("code") == "replica_lost" or event["error"]["message"] == "input: lost"


VALUES = [None, True, -1, 0, 1.5, 10**30, "", "x", "\ud800", [], [0], {}, {"type": "text"}, [[]], [{}], "\u0000"]
KINDS = [
    "message",
    "text",
    "input_text",
    "function_call",
    "function_call_output",
    "reasoning",
    "tool_use",
    "tool_result",
]


def spoiled(value: Any, rng: random.Random) -> Any:
    """``value`` with something in it replaced, dropped or added."""
    if rng.random() < 0.15 or not isinstance(value, list | dict) or not value:
        return rng.choice([*VALUES, *KINDS])
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    copy, key = (dict if isinstance(value, dict) else list)(value), rng.choice(keys)
    if rng.random() < 0.15:
        copy.pop(key)
    elif rng.random() < 0.15 and isinstance(copy, list):
        copy.append(copy[key])
    else:
        copy[key] = spoiled(copy[key], rng)
    return copy


def test_spoiled_bodies_never_break_the_server(server: Running):
    rng = random.Random(11)
    parts = [{"type": "input_text", "text": "Hi"}]
    items = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    response = asked(input=items, tools=[TOOL], text={"format": {"type": "text"}}, reasoning={"effort": "low"})
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    blocks = [{"type": "thinking", "thinking": "x", "signature": ""}, {"type": "text", "text": "x"}, use]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}
    turns = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    message = told(messages=turns, system="x", tools=[{"name": "f", "input_schema": {}}], stop_sequences=["x"])
    statuses = set()
    for number in range(240):
        path, body = rng.choice([(RESPONSES, response), (MESSAGES, message), (COUNT, message)])
        content = json.dumps(spoiled(body, rng) if number % 4 else body).encode()
        if rng.random() < 0.1:
            content = content[: rng.randrange(len(content))]
        answer = server.http.post(path, content=content, headers=JSON)
        statuses.add(answer.status_code)
        if answer.status_code != 200:
            assert answer.status_code in (400, 404), answer.text
            openai_error(answer) if path == RESPONSES else messages_error(answer)
    assert {200, 400} <= statuses


MANY = ["a" * 1000] * 8000
BLOCKS = [{"type": "text", "text": text} for text in MANY]


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_messages, told(messages=[*HELLO, {"role": "assistant", "content": BLOCKS}, *HELLO])),
        (read_responses, asked(input=[{"role": "assistant", "content": text} for text in MANY])),
    ],
)
def test_an_assistants_many_texts_are_joined_once(read: Callable[[bytes], Any], body: dict[str, object]):
    data = json.dumps(body).encode()
    begin = time.thread_time()
    chat = read(data).chat
    assert time.thread_time() - begin < 1  # one after the other takes some 10
    assert "\n".join(MANY) in [message["content"] for message in chat.messages]
