"""The Responses API with OpenAI's own client: answers, events, tools, earlier responses, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from qkv_engine import Engine
from qkv_engine.serve.dialects.responses_answer import ResponsesAnswer
from qkv_engine.serve.dialects.responses_body import read_responses
from qkv_engine.serve.errors import ApiError
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.limits import Limits
from qkv_engine.serve.tools.choice import ToolUse

from .running import ENDLESS_BODY, HELLO, Running, running
from .scripted import WEATHER, call_text, calling, say, seen

QUESTION = HELLO[0]["content"]
TOOL = {"type": "function", "name": "weather", "description": "The weather.", "parameters": WEATHER, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
ENDLESS = {"input": QUESTION, "max_output_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with calling(tmp_path_factory.mktemp("calling") / "demo") as found:
        yield found


def events_of(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type, and they are numbered."""
    answer = server.post({"stream": True, **body}, "/v1/responses")
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two equal responses have in common."""
    items = [{name: item[name] for name in item if name not in ("id", "call_id")} for item in response["output"]]
    fields = ("id", "created_at", "completed_at", "usage")
    return {name: response[name] for name in response if name not in fields} | {"output": items}


def test_a_question_is_answered_with_reasoning_and_usage(server: Running):
    found = server.openai.responses.create(model="demo", input=QUESTION)
    reasoning, message = found.output
    assert (found.status, found.object, found.model, found.output_text) == ("completed", "response", "demo", "4042")
    assert reasoning.type == "reasoning" and "0+2+0=2" in reasoning.content[0].text and reasoning.summary == []
    assert (message.role, message.status, message.content[0].annotations) == ("assistant", "completed", [])
    assert found.id.startswith("resp_") and reasoning.id.startswith("rs_") and message.id.startswith("msg_")
    assert found.completed_at >= found.created_at and found.error is found.incomplete_details is None
    chat = server.openai.chat.completions.create(model="demo", messages=HELLO)
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    ids = server.engine.chat(HELLO).token_ids
    closing = server.engine.tokenizer.encode("</think>", add_special_tokens=False)[0]
    assert usage.output_tokens_details.reasoning_tokens == ids.index(closing) + 1 < len(ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.kv_bits == 32
    again = server.openai.responses.create(model="demo", input="x " * 300, max_output_tokens=1)
    assert again.usage.input_tokens_details.cached_tokens == 0
    again = server.openai.responses.create(model="demo", input="x " * 300, max_output_tokens=1)
    assert again.usage.input_tokens_details.cached_tokens > 200


def test_events_come_in_order_and_make_the_whole(server: Running):
    events = events_of(server, {"input": QUESTION})
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind]
    opening, closing = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    reasoning = [*opening, "reasoning_text.delta", "reasoning_text.done", *closing]
    text = [*opening, "output_text.delta", "output_text.done", *closing]
    assert once == ["created", "in_progress", *reasoning, *text, "completed"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert "".join(deltas) == done["text"] == "4042" and len(deltas) > 1
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == items and events[0]["response"]["status"] == "in_progress"
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"] for item in items}
    whole = server.post({"input": QUESTION}, "/v1/responses").json()
    assert without_ids(last) == without_ids(whole) and last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_client_s_own_reader_of_streams_agrees(server: Running):
    with server.openai.responses.stream(model="demo", input=QUESTION) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "4042"


def test_items_become_messages(tools: Running, monkeypatch: pytest.MonkeyPatch):
    asked = seen(monkeypatch, tools)
    items = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "Is it"}, {"type": "input_text", "text": "warm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rom"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "20 degrees"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": "x"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "Sure?"},
    ]
    tools.openai.responses.create(
        model="demo", input=items, instructions="Be brief.", tools=[TOOL], max_output_tokens=1
    )

    def call(number: int, arguments: dict[str, str]) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}

    said = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm."}
    assert asked[0]["messages"] == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Is it\nwarm?"},
        said | {"tool_calls": [call(1, {"city": "Rom"}), call(2, {})]},
        {"role": "tool", "content": "20 degrees", "tool_call_id": "c1"},
        {"role": "tool", "content": "none", "tool_call_id": "c2"},
        {"role": "assistant", "content": "It is.", "reasoning_content": "So."},
        {"role": "user", "content": "Sure?"},
    ]
    assert asked[0]["kwargs"] == {"tools": [CHAT_TOOL]}


def test_parameters_reach_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch):
    asked = seen(monkeypatch, server)
    body = {"input": "Hi", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 2, "reasoning": {"effort": "low"}}
    own = {"kv_floor": "fp32", "seed": 3, "top_k": 5, "user": "me", "metadata": {"a": "b"}, "include": ["made.up"]}
    answer = server.post(
        body | own | {"kv_floor": None, "reasoning": {"effort": "low", "summary": "auto"}}, "/v1/responses"
    )
    params, found = asked[0]["params"], answer.json()
    assert (params.temperature, params.top_p, params.max_tokens, params.seed, params.top_k) == (0.5, 0.9, 2, 3, 5)
    assert asked[0]["kwargs"] == {"reasoning_effort": "low"} and found["metadata"] == {"a": "b"}
    assert (found["temperature"], found["max_output_tokens"], found["user"]) == (0.5, 2, "me")
    server.post({"input": "Hi", "max_output_tokens": 1, "reasoning": {"effort": "none"}}, "/v1/responses")
    assert asked[1]["kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_is_incomplete(server: Running, stream: bool):
    body = {"input": QUESTION, "max_output_tokens": 30}
    found = events_of(server, body)[-1] if stream else {"response": server.post(body, "/v1/responses").json()}
    assert found.get("type") in (None, "response.incomplete")
    response = found["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["incomplete"] and "completed_at" not in response


def test_a_form_is_met(server: Running):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    found = server.openai.responses.create(model="demo", input=QUESTION, text={"format": form}, max_output_tokens=1000)
    assert type(json.loads(found.output_text)["n"]) is int and found.text.format.name == "answer"
    wrong = server.post({"input": "Hi", "text": {"format": form | {"schema": {"type": "nope"}}}}, "/v1/responses")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "text.format"
    assert "text.format: " in wrong.json()["error"]["message"]


TWO = f"Let me see.\n{call_text('weather', city='Rom')}\n{call_text('weather', city='Pisa')}"


def test_calls_are_items_and_their_results_come_back(tools: Running, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        say(patched, tools, TWO)
        found = tools.openai.responses.create(model="demo", input="Is it warm?", tools=[TOOL], tool_choice="auto")
    message, first, second = found.output[-3:]
    assert found.status == "completed" and found.output_text == message.content[0].text == "Let me see."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "weather", {"city": "Rom"})
    assert json.loads(second.arguments) == {"city": "Pisa"} and first.call_id != second.call_id
    assert found.tools[0].name == "weather" and found.tool_choice == "auto" and found.parallel_tool_calls
    asked = seen(monkeypatch, tools)
    outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": "20"} for c in (first, second)]
    again = {"model": "demo", "tools": [TOOL], "max_output_tokens": 2}
    whole = tools.openai.responses.create(
        input=[{"role": "user", "content": "Is it warm?"}, *found.output, *outputs], **again
    )
    stored = tools.openai.responses.create(input=outputs, previous_response_id=found.id, **again)
    assert asked[0]["messages"] == asked[1]["messages"] and whole.usage.input_tokens == stored.usage.input_tokens
    roles = [message["role"] for message in asked[0]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"] and stored.previous_response_id == found.id
    calls = asked[0]["messages"][1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Rom"}, {"city": "Pisa"}]


def test_calls_are_streamed_as_items(tools: Running, monkeypatch: pytest.MonkeyPatch):
    say(monkeypatch, tools, TWO)
    events = events_of(tools, {"input": "Is it warm?", "tools": [TOOL]})
    arguments: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["item_id"]] = arguments.get(event["item_id"], "") + event["delta"]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert {event["item_id"]: event["arguments"] for event in done} == arguments and len(done) == 2
    calls = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Rom", "Pisa"]
    with tools.openai.responses.stream(model="demo", input="Is it warm?", tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output][-3:] == ["message", "function_call", "function_call"]
    once = tools.openai.responses.create(model="demo", input="?", tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in once.output].count("function_call") == 1


def test_an_earlier_response_is_gone_on_with_fetched_and_deleted(server: Running, monkeypatch: pytest.MonkeyPatch):
    asked, client = seen(monkeypatch, server), server.openai.responses
    first = client.create(model="demo", input=QUESTION, instructions="Be brief.")
    second = client.create(model="demo", input="And 2+2?", previous_response_id=first.id, instructions="Be long.")
    third = client.create(model="demo", input="And 3+3?", previous_response_id=second.id, max_output_tokens=1)
    assert [message["role"] for message in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][0]["content"] == "Be long." and asked[1]["messages"][2]["content"] == "4042"
    assert [message["role"] for message in asked[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    fetched = client.retrieve(first.id)
    assert fetched.to_dict() == first.to_dict() and client.retrieve(third.id).status == "incomplete"
    streamed = events_of(server, {"input": "Hi", "max_output_tokens": 2})[-1]["response"]
    assert server.http.get(f"/v1/responses/{streamed['id']}").json() == streamed
    assert server.http.delete(f"/v1/responses/{first.id}").json()["deleted"]
    client.delete(second.id)
    for response_id in (first.id, second.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError):
            client.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            client.delete(response_id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.create(model="demo", input="Hi", previous_response_id=response_id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_stored_is_not(server: Running):
    found = server.openai.responses.create(model="demo", input="Hi", store=False, max_output_tokens=1)
    assert found.store is False and server.http.get(f"/v1/responses/{found.id}").status_code == 404


def test_no_tenant_reads_another_s_responses(small_engine: Engine):
    keys = {"alice": "alice-secret-1", "bob": "bob-secret-22"}
    with running(small_engine, keys=Keys(list(keys.items()))) as server:
        alice, bob = (server.openai.with_options(api_key=key).responses for key in keys.values())
        found = alice.create(model="demo", input="Hi", max_output_tokens=1)
        assert alice.retrieve(found.id).id == found.id
        for call in (bob.retrieve, bob.delete):
            with pytest.raises(openai.NotFoundError):
                call(found.id)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            bob.create(model="demo", input="Hi", previous_response_id=found.id)
        assert alice.retrieve(found.id).id == found.id
        assert server.http.get(f"/v1/responses/{found.id}").status_code == 401


def test_the_oldest_responses_make_room(small_engine: Engine):
    with running(small_engine, limits=Limits(response_memory=20_000)) as server:
        ids = [server.openai.responses.create(model="demo", input="Hi", max_output_tokens=1).id for _ in range(12)]
        kept = [server.http.get(f"/v1/responses/{name}").status_code == 200 for name in ids]
        assert kept == sorted(kept) and 0 < sum(kept) < 12
    with running(small_engine, limits=Limits(response_memory=0)) as server:
        found = server.openai.responses.create(model="demo", input="Hi", max_output_tokens=1)
        assert not found.store and server.http.get(f"/v1/responses/{found.id}").status_code == 404
        refused = server.post({"input": "Hi", "previous_response_id": found.id}, "/v1/responses").json()["error"]
        assert refused["param"] == "previous_response_id" and "keeps no responses" in refused["message"]


def test_a_request_that_breaks_off_fails(small_engine: Engine):
    with running(small_engine, limits=Limits(request_timeout=0.5)) as server:
        *_, last = events_of(server, ENDLESS)
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "timeout" and last["response"]["output"]
        assert server.post(ENDLESS | {"stream": False}, "/v1/responses").status_code == 504
        server.wait_until_idle()


def test_what_breaks_off_before_a_token_is_created_and_fails():
    asked = read_responses(b'{"input": "Hi"}')
    answer = ResponsesAnswer(asked, "resp_1", "demo", ToolUse(asked.chat, None), print, is_stored=False)
    events = [json.loads(event.split(b"data: ")[1]) for event in answer.failure(ApiError(503, "gone", param="input"))]
    assert [event["type"] for event in events] == [f"response.{name}" for name in ("created", "in_progress", "failed")]
    assert [event["sequence_number"] for event in events] == [0, 1, 2] and events[2]["response"]["output"] == []
    assert events[2]["response"]["error"] == {"code": "server_error", "message": "gone", "param": "input"}


def test_a_client_that_leaves_aborts_its_response(server: Running):
    with server.http.stream("POST", "/v1/responses", json=ENDLESS) as stream:
        lines = stream.iter_lines()
        response_id = json.loads([next(lines), next(lines)][1].removeprefix("data: "))["response"]["id"]
        assert server.engine.stats().num_running == 1
    server.wait_until_idle(5)
    assert server.http.get(f"/v1/responses/{response_id}").status_code == 404


def test_limits_hold_for_it_as_for_chats(small_engine: Engine):
    with running(small_engine, limits=Limits(max_requests=1, max_body=2000)) as server:
        with server.http.stream("POST", "/v1/responses", json=ENDLESS) as stream:
            lines = stream.iter_lines()
            next(lines)
            bodies = ((ENDLESS, "/v1/responses"), (ENDLESS_BODY, "/v1/completions"))
            refused = [server.post(body, path) for body, path in bodies]
            assert [answer.status_code for answer in refused] == [429, 429] and refused[0].headers["retry-after"]
        server.wait_until_idle(5)
        assert server.post({"input": "x" * 3000}, "/v1/responses").status_code == 413


def test_a_stream_cut_at_any_event_is_a_beginning(server: Running):
    """Of each prefix the items that are done are those of the whole, and the texts are beginnings of theirs."""
    events = events_of(server, {"input": QUESTION})
    whole = {item["id"]: item["content"][0]["text"] for item in events[-1]["response"]["output"]}
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith("_text.delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        assert all(whole[name].startswith(text) for name, text in texts.items())
        if event["type"] == "response.output_item.done":
            assert texts[event["item"]["id"]] == whole[event["item"]["id"]]
    assert texts == whole
