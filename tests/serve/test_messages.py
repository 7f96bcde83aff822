"""The Messages API with Anthropic's own client: answers, events, tools, thinking, counts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from qkv_engine import Engine
from qkv_engine.loading import demo_folder
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.limits import Limits

from .running import HELLO, Running, running
from .scripted import WEATHER, call_text, calling, say, seen

if TYPE_CHECKING:
    import anthropic

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 1000, "messages": HELLO}
ENDLESS = {**ASKED, "max_tokens": 4000, "ignore_eos": True, "stream": True}
TWO = f"Let me see.\n{call_text('weather', city='Rom')}\n{call_text('weather', city='Pisa')}"


def client_of(server: Running, key: str = "any") -> anthropic.Anthropic:
    import anthropic  # two seconds, which whoever only collects the tests does not need

    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as found:
        yield found


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with calling(tmp_path_factory.mktemp("calling") / "demo", model=demo_folder()) as found:
        yield found


def events_of(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    answer = server.post({"stream": True, **body}, MESSAGES)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(answer: Any) -> dict[str, str]:
    found = answer.json()
    assert set(found) == {"type", "error", "request_id"} and found["type"] == "error"
    assert found["request_id"] == answer.headers["x-request-id"] and set(found["error"]) == {"type", "message"}
    return found["error"]


def test_a_question_is_answered_with_thinking_and_usage(server: Running, client: anthropic.Anthropic):
    found = client.messages.create(**ASKED)
    thinking, text = found.content
    assert (found.type, found.role, found.model, found.id[:4]) == ("message", "assistant", "demo", "msg_")
    assert thinking.type == "thinking" and "0+2+0=2" in thinking.thinking and thinking.signature
    assert (text.text, found.stop_reason, found.stop_sequence) == ("4042", "end_turn", None)
    chat, usage = server.openai.chat.completions.create(model="demo", messages=HELLO).usage, found.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.prompt_tokens, chat.completion_tokens)
    assert 30 < usage.output_tokens_details.thinking_tokens < usage.output_tokens and usage.kv_bits == 32


def test_usage_has_cached_tokens_apart(client: anthropic.Anthropic):
    long = [{"role": "user", "content": "y " * 300}]
    first, second = (client.messages.create(model="demo", max_tokens=1, messages=long).usage for _ in range(2))
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, 0)
    assert second.cache_read_input_tokens > 200
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens
    with client.messages.stream(model="demo", max_tokens=1, messages=long) as stream:
        begun = next(event for event in stream if event.type == "message_start").message
    assert begun.usage.cache_read_input_tokens == second.cache_read_input_tokens and begun.content == []


def test_events_come_in_order_and_make_the_whole(server: Running, client: anthropic.Anthropic):
    events = events_of(server, ASKED)
    kinds = [event["type"] for event in events]
    once = [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
    assert deltas.count("signature_delta") == 1 and deltas.count("text_delta") > 1
    end = events[-2]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    with client.messages.stream(**ASKED) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    whole = client.messages.create(**ASKED)
    assert text == whole.content[1].text == final.content[1].text
    assert final.content[0].thinking == whole.content[0].thinking and final.content[0].signature == final.id
    assert final.usage.output_tokens == whole.usage.output_tokens == end["usage"]["output_tokens"]


def test_blocks_become_messages(tools: Running, monkeypatch: pytest.MonkeyPatch):
    asked = seen(monkeypatch, tools)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is it"}, {"type": "text", "text": "warm?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rom"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "20 degrees"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "none"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;\n"
    system = [{"type": "text", "text": f"{billing}Be brief."}, {"type": "text", "text": "Use tools."}]
    client_of(tools).messages.create(model="demo", max_tokens=1, messages=messages, system=system, tools=[TOOL])

    def call(number: int, given: dict[str, str]) -> dict[str, Any]:
        return {"id": f"t{number}", "type": "function", "function": {"name": "weather", "arguments": given}}

    said = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm."}
    assert asked[0]["messages"] == [
        {"role": "system", "content": "Be brief.\nUse tools."},
        {"role": "user", "content": "Is it\nwarm?"},
        said | {"tool_calls": [call(1, {"city": "Rom"}), call(2, {})]},
        {"role": "tool", "content": "20 degrees", "tool_call_id": "t1"},
        {"role": "tool", "content": "none", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "Sure?"},
    ]
    assert asked[0]["kwargs"] == {"tools": [CHAT_TOOL]}


def test_parameters_reach_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch):
    asked = seen(monkeypatch, server)
    own = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "metadata": {"user_id": "me"}}
    thinking = {"type": "enabled", "budget_tokens": 2000}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "integer"}}}
    server.post({**ASKED, **own, "max_tokens": 2, "thinking": thinking, "output_config": config}, MESSAGES)
    params = asked[0]["params"]
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ["x"])
    assert params.max_tokens == 2 and json.loads(params.structured_outputs.json) == {"type": "integer"}
    assert asked[0]["kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    server.post({**ASKED, "max_tokens": 1, "thinking": {"type": "disabled"}}, MESSAGES)
    assert asked[1]["kwargs"] == {"enable_thinking": False}


def test_why_an_answer_ends(server: Running, client: anthropic.Anthropic):
    stopped = client.messages.create(**{**ASKED, "stop_sequences": ["42"]})
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[1].text) == ("stop_sequence", "42", "40")
    with client.messages.stream(**{**ASKED, "stop_sequences": ["42"]}) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "42")
    cut = client.messages.create(**{**ASKED, "max_tokens": 5})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)


@pytest.mark.parametrize("most", [10_000, pytest.param(250, marks=pytest.mark.slow)])
def test_more_tokens_than_the_context_has_are_what_it_has(most: int):
    """Clients send the bound of Anthropic's models, which smaller contexts never have room for."""
    with Engine(kv="fp32", kv_memory="64MiB", max_model_len=250) as engine, running(engine) as server:
        fits = client_of(server).messages.create(**{**ASKED, "max_tokens": most})
        assert fits.stop_reason == "end_turn"
        body = {**ASKED, "max_tokens": most, "ignore_eos": True}
        full = server.post(body, MESSAGES).json()
        assert full["stop_reason"] == "model_context_window_exceeded"
        assert full["usage"]["input_tokens"] + full["usage"]["output_tokens"] == 250
        long = server.post({**ASKED, "messages": [{"role": "user", "content": "x y " * 900}]}, MESSAGES)
        assert long.status_code == 400 and error_of(long)["message"].startswith("messages: ")


def test_tools_are_used_and_their_results_come_back(tools: Running, monkeypatch: pytest.MonkeyPatch):
    client = client_of(tools)
    with monkeypatch.context() as patched:
        say(patched, tools, TWO)
        found = client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "auto"})
        once = client.messages.create(
            **ASKED, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
    text, first, second = found.content[-3:]
    assert (text.text, found.stop_reason) == ("Let me see.", "tool_use")
    assert (first.type, first.name, first.input, second.input) == (
        "tool_use",
        "weather",
        {"city": "Rom"},
        {"city": "Pisa"},
    )
    assert [block.type for block in once.content].count("tool_use") == 1
    asked = seen(monkeypatch, tools)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "20"} for block in (first, second)]
    messages = [*HELLO, {"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    client.messages.create(model="demo", max_tokens=1, tools=[TOOL], messages=messages)
    _, assistant, *results = asked[0]["messages"]
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Rom"}, {"city": "Pisa"}]
    assert [result["tool_call_id"] for result in results] == [first.id, second.id] and assistant["reasoning_content"]


def test_tools_are_streamed_as_blocks(tools: Running, monkeypatch: pytest.MonkeyPatch):
    say(monkeypatch, tools, TWO)
    with client_of(tools).messages.stream(**ASKED, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Rom"}, {"city": "Pisa"}]
    assert final.stop_reason == "tool_use" and "input_json" in [event.type for event in events]


def test_tokens_are_counted_as_they_are_used(tools: Running, server: Running, client: anthropic.Anthropic):
    assert client.messages.count_tokens(model="demo", messages=HELLO).input_tokens == 19
    asked = {"model": "demo", "messages": HELLO, "tools": [TOOL], "system": "Be brief."}
    counted = client_of(tools).messages.count_tokens(**asked).input_tokens
    usage = client_of(tools).messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert counted == tools.post({"messages": chat, "tools": [CHAT_TOOL]}, "/tokenize").json()["count"]
    assert "messages" in error_of(server.post({"model": "demo", "messages": []}, COUNT))["message"]
    assert error_of(server.post({"model": "x", "messages": HELLO}, COUNT))["type"] == "not_found_error"


def test_a_key_is_taken_from_either_header(small_engine: Engine):
    import anthropic

    with running(small_engine, keys=Keys([("alice", "alice-secret-1"), ("bob", "bob-secret-22")])) as server:
        assert client_of(server, "alice-secret-1").messages.create(**{**ASKED, "max_tokens": 1}).type == "message"
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="alice-secret-1", max_retries=0)
        assert bearer.messages.count_tokens(model="demo", messages=HELLO).input_tokens
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client_of(server, "alice-secret-2").messages.create(**ASKED)
        assert caught.value.type == "authentication_error" and "x-api-key" in str(caught.value)
        assert server.http.get("/v1/models", headers={"x-api-key": "alice-secret-1"}).status_code == 200
        negative = server.http.post(MESSAGES, json={**ASKED, "priority": -1}, headers={"x-api-key": "alice-secret-1"})
        assert error_of(negative)["message"].startswith("priority: ")


def test_a_stream_that_breaks_off_ends_with_an_error(small_engine: Engine):
    import anthropic

    with running(small_engine, limits=Limits(request_timeout=0.5, max_body=5000)) as server:
        *_, last = events_of(server, ENDLESS)
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
        whole = server.post({**ENDLESS, "stream": False}, MESSAGES)
        assert whole.status_code == 504 and error_of(whole)["type"] == "timeout_error"
        large = server.post({**ASKED, "system": "x" * 6000}, MESSAGES)
        assert large.status_code == 413 and error_of(large)["type"] == "request_too_large"
        with (
            pytest.raises(anthropic.APIStatusError),
            client_of(server).messages.stream(
                **{name: value for name, value in ENDLESS.items() if name not in ("stream", "ignore_eos")},
                extra_body={"ignore_eos": True},
            ) as stream,
        ):
            stream.until_done()
        server.wait_until_idle()


def test_a_long_silence_is_filled_with_pings(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("qkv_engine.serve.events.KEEP_ALIVE", 0.01)
    answer = server.post({**ASKED, "stream": True}, MESSAGES).text
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in answer
    client = client_of(server)
    with client.messages.stream(**ASKED) as stream:
        assert stream.get_final_text() == "4042"


def test_a_client_that_leaves_aborts_its_message(server: Running):
    with server.http.stream("POST", MESSAGES, json=ENDLESS) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: message_start" and server.engine.stats().num_running == 1
    server.wait_until_idle(5)


def test_too_many_requests_are_a_429(small_engine: Engine):
    with running(small_engine, limits=Limits(max_requests=1)) as server:
        with server.http.stream("POST", MESSAGES, json=ENDLESS) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = server.post(ASKED, MESSAGES)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert error_of(refused)["type"] == "rate_limit_error"
        server.wait_until_idle(5)


def test_a_stream_cut_at_any_event_is_a_beginning(tools: Running, monkeypatch: pytest.MonkeyPatch):
    """Of each prefix the blocks that are closed are those of the whole, and the others are beginnings of theirs."""
    say(monkeypatch, tools, TWO)
    body = {**ASKED, "tools": [TOOL]}
    whole = tools.post(body, MESSAGES).json()["content"]
    expected = [block.get("text") or block.get("thinking") or block["input"] for block in whole]
    texts: list[str] = []
    for event in events_of(tools, body):
        if event["type"] == "content_block_start":
            assert event["index"] == len(texts)
            texts.append("")
        elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            texts[event["index"]] += event["delta"]["partial_json" if kind == "input_json" else kind]
            if kind != "input_json":
                assert expected[event["index"]].startswith(texts[event["index"]])
        elif event["type"] == "content_block_stop":
            text = texts[event["index"]]
            assert expected[event["index"]] in (text, json.loads(text) if text.startswith("{") else None)
    assert len(texts) == len(expected) == 4
