"""Forced, strict and single calls in all three dialects, by models that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import Engine

from .family_models import make_model
from .running import HELLO, Running, running
from .scripted import call_text, calling, say, seen
from .tool_writers import FORMS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
UNITS = ["add", "multiply"]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": UNITS},
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 6},
        "exact": {"type": "boolean"},
    },
    "required": ["kind", "a"],
}
NAMES = ("compute", "look_up")
# Some families in all runs, the others in the long ones.
QUICK = ("mistral", "gpt-oss")
SAME_FORM = ("mistral-ids", "gpt-oss-role", "glm-4.7")  # as a template tells: they are read like others
families = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FORMS if name not in SAME_FORM],
)


def chat_tools(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}} for name in NAMES]


def responses_tools() -> list[dict[str, Any]]:
    return [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]


def messages_tools() -> list[dict[str, Any]]:
    return [{"name": name, "input_schema": SCHEMA} for name in NAMES]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check(name: str, arguments: Any) -> None:
    """Checks that a call is one of the tools', and meets their schema."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name in NAMES and given["kind"] in UNITS and given.keys() <= SCHEMA["properties"].keys()
    assert type(given["a"]) is int and 0 <= given["a"] <= 99
    assert isinstance(given.get("note", ""), str) and len(given.get("note", "")) <= 6
    assert isinstance(given.get("exact", True), bool)


@contextmanager
def family_server(folder: Path, name: str) -> Iterator[Running]:
    make_model(folder / name, name)
    engine = Engine(str(folder / name), load_format="random", kv="fp32", kv_memory="32MiB", max_model_len=4096)
    with engine, running(engine) as server:
        yield server


def answer_at_once(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    """Keeps a model from thinking, of which random weights find no end."""
    tokenizer, params = server.engine.tokenizer, server.engine.params
    found = [tokenizer.token_of("<think>"), tokenizer.token_of("analysis")]
    bias = {token_id: -100.0 for token_id in found if token_id is not None}
    monkeypatch.setattr(server.engine, "params", lambda **changes: params(**changes, logit_bias=bias))


@families
def test_every_family_writes_forced_calls_in_every_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Random weights: whatever is sampled under the grammar is a call that the dialect gives back."""
    sampled = {"temperature": 1.0, "max_tokens": 3000}
    with family_server(tmp_path, name) as server:
        answer_at_once(monkeypatch, server)
        for seed in range(2):
            body = {"messages": HELLO, "tools": chat_tools(), "seed": seed, **sampled}
            (choice,) = server.post({**body, "tool_choice": "required"}, CHAT).json()["choices"]
            calls = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            for call in calls:
                check(call["function"]["name"], call["function"]["arguments"])
        stream = server.openai.chat.completions.create(model="demo", **body, tool_choice=named("look_up"), stream=True)
        deltas = [chunk.choices[0].delta.tool_calls for chunk in stream]
        pieces = [call for calls in deltas for call in calls or ()]
        assert pieces[0].id and [piece.function.name for piece in pieces if piece.function.name] == ["look_up"]
        check("look_up", "".join(piece.function.arguments for piece in pieces))
        assert len(pieces) > 3, "arguments come as they are sampled"
        asked = {"input": "Hi", "tools": responses_tools(), "tool_choice": "required", "parallel_tool_calls": False}
        response = server.post({**asked, "temperature": 1.0, "seed": 3}, RESPONSES).json()
        (item,) = [item for item in response["output"] if item["type"] != "reasoning"]
        assert response["status"] == "completed" and item["type"] == "function_call"
        check(item["name"], item["arguments"])
        told = {"messages": HELLO, "tools": messages_tools(), "tool_choice": {"type": "any"}, "seed": 4, **sampled}
        message = server.post(told, MESSAGES).json()
        assert message["stop_reason"] == "tool_use"
        for block in message["content"]:
            if block["type"] != "thinking":
                check(block["name"], block["input"])
        results = [
            {"type": "tool_result", "tool_use_id": block.get("id"), "content": "5"} for block in message["content"][-1:]
        ]
        again = [*HELLO, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
        assert server.post({**told, "messages": again}, MESSAGES).status_code == 200
        server.wait_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMS if name not in SAME_FORM])
def test_every_family_streams_the_calls_that_it_gives_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Required and named calls of every dialect, by one seed: parsed pieces are the whole, which meets the schema."""
    sampled = {"messages": HELLO, "temperature": 1.0, "seed": 5, "max_tokens": 3000}
    asked = {"input": "Hi", "temperature": 1.0, "seed": 5, "tools": responses_tools()}
    by_name = {"type": "function", "name": "look_up"}
    with family_server(tmp_path, name) as server:
        answer_at_once(monkeypatch, server)
        for chosen, any_of in (("required", NAMES), ("look_up", ("look_up",))):
            is_named = chosen != "required"
            chat = {**sampled, "tools": chat_tools(), "tool_choice": named(chosen) if is_named else chosen}
            response = {**asked, "tool_choice": by_name if is_named else chosen}
            choice = {"type": "tool", "name": chosen} if is_named else {"type": "any"}
            message = {**sampled, "tools": messages_tools(), "tool_choice": choice}
            for body, read in ((chat, chat_calls), (response, response_calls), (message, message_calls)):
                whole, streamed = read(server, body), read(server, {**body, "stream": True})
                assert whole and all(called in any_of for called, _ in whole)
                for called, arguments in whole:
                    check(called, arguments)
                assert parsed(streamed) == parsed(whole)
        server.wait_until_idle()


Calls = list[tuple[str, Any]]


def parsed(calls: Calls) -> Calls:
    return [(name, json.loads(given) if isinstance(given, str) else given) for name, given in calls]


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    answer = server.post(body, path)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_calls(server: Running, body: dict[str, Any]) -> Calls:
    if not body.get("stream"):
        calls = server.post(body, CHAT).json()["choices"][0]["message"]["tool_calls"]
        return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    found: dict[int, list[str]] = {}
    for chunk in events(server, CHAT, body):
        for call in chunk["choices"][0]["delta"].get("tool_calls") or () if chunk["choices"] else ():
            name, arguments = found.setdefault(call["index"], ["", ""])
            given = call["function"]
            found[call["index"]] = [name + (given.get("name") or ""), arguments + (given.get("arguments") or "")]
    return [(name, arguments) for name, arguments in found.values()]


def response_calls(server: Running, body: dict[str, Any]) -> Calls:
    if not body.get("stream"):
        items = server.post(body, RESPONSES).json()["output"]
        return [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    names, arguments = dict[int, str](), dict[int, str]()
    for event in events(server, RESPONSES, body):
        if event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
            names[event["output_index"]] = event["item"]["name"]
        if event["type"] == "response.function_call_arguments.delta":
            index = event["output_index"]
            arguments[index] = arguments.get(index, "") + event["delta"]
    return [(name, arguments[index]) for index, name in names.items()]


def message_calls(server: Running, body: dict[str, Any]) -> Calls:
    if not body.get("stream"):
        blocks = server.post(body, MESSAGES).json()["content"]
        return [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    names, arguments = dict[int, str](), dict[int, str]()
    for event in events(server, MESSAGES, body):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]], arguments[event["index"]] = event["content_block"]["name"], ""
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            arguments[event["index"]] += event["delta"]["partial_json"]
    return [(name, arguments[index] or "{}") for index, name in names.items()]


def force_calls(server: Running, number: int, **body: Any) -> list[dict[str, Any]]:
    """Choices of forced calls of the demo model, many at once."""

    def one(index: int) -> dict[str, Any]:
        question = [{"role": "user", "content": f"What is {index + 10}*{index % 7 + 11}?"}]
        asked = {"messages": question, "tools": chat_tools(), "tool_choice": "required", "max_tokens": 1500}
        answer = server.http.post(CHAT, json={**asked, "parallel_tool_calls": False, **body}, timeout=600)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(one, range(number)))


def check_all(choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


def test_the_demo_model_calls_where_it_must(server: Running):
    """Its template knows no tools: the form is that of most models."""
    check_all(force_calls(server, 5))


@pytest.mark.slow
def test_all_forced_calls_are_valid_under_pressure():
    """200 of 200, in memory for a few of them at full precision."""
    with Engine(kv="auto", kv_memory="6MiB", max_model_len=1900) as engine, running(engine) as server:
        check_all(force_calls(server, 200, max_tokens=400))
        stats = engine.stats()
        assert stats.num_demotions > 0 or stats.num_preemptions > 0
        server.wait_until_idle()


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with calling(tmp_path_factory.mktemp("calling") / "demo") as found:
        yield found


def test_arguments_are_streamed_as_they_come(tools: Running, monkeypatch: pytest.MonkeyPatch):
    say(
        monkeypatch,
        tools,
        f"Let me see.\n{call_text('compute', kind='add', a=5)}\n{call_text('look_up', kind='add', a=6)}",
    )
    asked = {"model": "demo", "messages": HELLO, "tools": chat_tools()}
    with tools.openai.chat.completions.stream(**asked) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    calls = final.message.tool_calls or []
    assert [json.loads(call.function.arguments)["a"] for call in calls] == [5, 6] and len(deltas) > 8
    assert final.message.content == "Let me see." and final.finish_reason == "tool_calls"
    once = tools.openai.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert len(once.message.tool_calls or []) == 1 and once.message.content == "Let me see."
    none = tools.openai.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert none.message.tool_calls is None and none.message.content.count("<tool_call>") == 2


def structured(monkeypatch: pytest.MonkeyPatch, server: Running, **body: Any) -> tuple[int, str]:
    """The status of a chat, and the grammar that the engine was given."""
    with monkeypatch.context() as patched:
        asked = seen(patched, server)
        answer = server.post({"messages": HELLO, "tools": chat_tools(), "max_tokens": 2, **body}, CHAT)
    form = asked[0]["params"].structured_outputs if asked else None
    return answer.status_code, "" if form is None else form.grammar or form.json


def test_strict_tools_and_forms_of_answers_are_grammars(tools: Running, monkeypatch: pytest.MonkeyPatch):
    assert structured(monkeypatch, tools) == (200, "")
    status, strict = structured(monkeypatch, tools, tools=chat_tools(strict=True))
    assert status == 200 and strict.count("look_up") == 1 and "lenient" not in strict
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    status, either = structured(monkeypatch, tools, response_format=schema)
    assert status == 200 and "look_up" in either and '"type": "integer"' in either
    status, alone = structured(monkeypatch, tools, response_format=schema, tool_choice="none")
    assert status == 200 and json.loads(alone) == {"type": "integer"}
    status, one = structured(monkeypatch, tools, tool_choice=named("compute"))
    assert status == 200 and "compute" in one and "look_up" not in one


@pytest.mark.parametrize(
    ("body", "param", "piece"),
    [
        ({"tool_choice": "some"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "function": "f"}}, "tool_choice", "required"),
        ({"tool_choice": named("other")}, "tool_choice", "other"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "tools"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tool_choice", "tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "leave out"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice", "leave out"),
        ({"tool_choice": "required", "ignore_eos": True}, "tools", "ignore_eos"),
        (
            {
                "tool_choice": "required",
                "tools": [named("f") | {"function": {"name": "f", "parameters": {"type": "nope"}}}],
            },
            "tools",
            "nope",
        ),
    ],
)
def test_choices_that_cannot_be_honoured_are_refused(tools: Running, body: dict[str, Any], param: str, piece: str):
    answer = tools.post({"messages": HELLO, "tools": chat_tools(), **body}, CHAT)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and piece in error["message"]
