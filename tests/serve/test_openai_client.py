"""OpenAI's own client against the server: chats, completions, streams, errors."""

from __future__ import annotations

import asyncio
import json
import math
import re

import openai
import pytest

from .running import HELLO, Running


def test_a_chat_is_answered_with_reasoning_and_usage(server: Running):
    answer = server.openai.chat.completions.create(model="demo", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "4042", "stop")
    assert "0+2+0=2" in choice.message.reasoning_content
    whole = server.engine.chat(HELLO)
    assert answer.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert answer.usage.completion_tokens == len(whole.token_ids)
    assert answer.usage.kv_bits == 32 and sum(answer.usage.kv_blocks.values()) == 1
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "demo", "chatcmpl-")
    assert answer._request_id in answer.id


def test_a_chat_streams_role_text_end_and_usage(server: Running):
    usage = {"include_usage": True}
    stream = server.openai.chat.completions.create(model="demo", messages=HELLO, stream=True, stream_options=usage)
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "4042"
    assert "0+2+0=2" in "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert last.choices == [] and last.usage.completion_tokens > 50 and last.usage.kv_bits == 32
    assert len({chunk.id for chunk in (*chunks, last)}) == 1 and len(chunks) > 20


def test_a_stream_is_silent_about_usage_unless_asked(server: Running):
    chunks = list(server.openai.completions.create(model="demo", prompt="Hi", stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_several_completions_are_told_apart(server: Running):
    asked = {"model": "demo", "messages": HELLO, "n": 3, "temperature": 3.0, "seed": 7, "max_tokens": 20}
    whole = server.openai.chat.completions.create(**asked)
    texts = {c.index: (c.message.content, getattr(c.message, "reasoning_content", "")) for c in whole.choices}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) == 3
    streamed = {index: ["", ""] for index in texts}
    ends = []
    for chunk in server.openai.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index][0] += choice.delta.content or ""
        streamed[choice.index][1] += getattr(choice.delta, "reasoning_content", "")
        ends += [choice.index] if choice.finish_reason else []
    assert {index: tuple(parts) for index, parts in streamed.items()} == texts
    assert sorted(ends) == [0, 1, 2]


def test_a_seed_repeats_an_answer(server: Running):
    first, second, other = (
        server.openai.completions.create(model="demo", prompt="Hi", temperature=2.0, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_stop_strings_and_lengths_end_an_answer(server: Running):
    stopped = server.openai.chat.completions.create(model="demo", messages=HELLO, stop=["42"])
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].stop_reason == "42"
    assert stopped.choices[0].message.content == "40"
    for limit in ("max_tokens", "max_completion_tokens"):
        cut = server.openai.chat.completions.create(model="demo", messages=HELLO, **{limit: 5})
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 5


def test_biases_and_penalties_reach_the_sampler(server: Running):
    plain = server.openai.completions.create(model="demo", prompt="Hello", max_tokens=8).choices[0].text
    token_id = server.post({"prompt": "Hello", "max_tokens": 1, "return_token_ids": True}).json()["choices"][0]
    biased = server.openai.completions.create(
        model="demo", prompt="Hello", max_tokens=8, logit_bias={token_id["token_ids"][0]: -100}
    )
    assert not biased.choices[0].text.startswith(plain[:3])
    penalized = server.openai.completions.create(model="demo", prompt="Hello", max_tokens=8, frequency_penalty=2)
    assert penalized.choices[0].text != plain


def test_logprobs_of_a_chat(server: Running):
    asked = {"model": "demo", "messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    content = server.openai.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        assert [token.logprob, *[top.logprob for top in token.top_logprobs]] == sorted(
            [token.logprob, *[top.logprob for top in token.top_logprobs]], reverse=True
        )
        assert len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token
        assert bytes(token.bytes).decode() == token.token and math.exp(token.logprob) <= 1
    chunks = server.openai.chat.completions.create(**asked, stream=True)
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in content]


def test_bytes_of_tokens_are_those_of_the_text_within_characters(server: Running):
    form = {"structured_outputs": {"choice": ["a😀é漢b"]}}
    answer = server.openai.chat.completions.create(model="demo", messages=HELLO, logprobs=True, extra_body=form)
    content = answer.choices[0].logprobs.content
    written = b"".join(bytes(token.bytes) for token in content)
    assert len(content) > 10 and "</think>a😀é漢b" in written.decode()


def test_likeliest_tokens_of_a_completion_have_the_sampled_one_beside_them(server: Running):
    asked = {"model": "demo", "prompt": "What is 2+2?", "logprobs": 2, "max_tokens": 8, "temperature": 5, "seed": 3}
    logprobs = server.openai.completions.create(**asked).choices[0].logprobs
    numbers = [len(top) for top in logprobs.top_logprobs]
    assert max(numbers) == 3, numbers  # where the draw was an unlikely one
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value


def test_a_completion_echoes_its_prompt_with_logprobs(server: Running):
    goes_on = {"logit_bias": {"2": -100}}  # no end of the turn
    asked = {"model": "demo", "prompt": "What is 2+2?", "echo": True, "logprobs": 1, "max_tokens": 3, **goes_on}
    choice = server.openai.completions.create(**asked).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("What is 2+2?") and "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    starts = [
        choice.text[offset:].startswith(t) for t, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True)
    ]
    assert all(starts) and len(starts) > 5
    scoring = server.openai.completions.create(**{**asked, "max_tokens": 0})
    scored, usage = scoring.choices[0], scoring.usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)
    assert scored.text == "What is 2+2?" and scored.logprobs.tokens == logprobs.tokens[:-3]
    streamed = [chunk.choices[0] for chunk in server.openai.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in streamed) == choice.text
    assert [t for part in streamed if part.logprobs for t in part.logprobs.text_offset] == logprobs.text_offset


def test_prompts_are_text_or_ids_or_lists_of_these(server: Running):
    ids = server.post({"prompt": "Hello"}, "/tokenize").json()["tokens"]
    texts = [
        [choice.text for choice in server.openai.completions.create(model="demo", prompt=prompt, max_tokens=4).choices]
        for prompt in ("Hello", ids, ["Hello", "Hi"], [ids, ids])
    ]
    assert texts[0] == texts[1] == texts[2][:1] == texts[3][:1] and len(texts[2]) == len(texts[3]) == 2
    stream = server.openai.completions.create(model="demo", prompt=["Hello", "Hi"], max_tokens=4, stream=True)
    streamed = {0: "", 1: ""}
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts[2]


def test_no_max_tokens_is_16_for_a_completion(server: Running):
    answer = server.openai.completions.create(model="demo", prompt="Hello", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_models_are_listed_by_every_name(server: Running):
    assert [model.id for model in server.openai.models.list()] == ["demo", "alias"]
    assert server.openai.models.retrieve("alias").max_model_len == server.engine.max_model_len
    assert server.openai.completions.create(model="alias", prompt="Hi", max_tokens=1).model == "demo"
    for call in (server.openai.models.retrieve, lambda name: server.openai.completions.create(model=name, prompt="")):
        with pytest.raises(openai.NotFoundError) as caught:
            call("gpt-x")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_errors_name_the_field(server: Running):
    def error(**body: object) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai.chat.completions.create(**{"model": "demo", "messages": HELLO, **body})
        assert caught.value.type == "invalid_request_error" and caught.value.response.status_code == 400
        return caught.value

    assert error(temperature=-1).param == "temperature" and "[0, 100]" in error(temperature=-1).message
    assert error(temperature="hot").param == "temperature"
    assert error(top_logprobs=3).param == error(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert error(messages=[]).param == "messages"
    assert error(messages=[{"role": "user"}]).param == "messages[0].content"
    for length in (100_000, 200_000):  # too long as tokens, and before they are counted
        long = error(messages=[{"role": "user", "content": "x" * length}])
        assert (long.code, long.param) == ("context_length_exceeded", "messages")
    assert error(max_tokens=8192).param == "max_tokens"
    limit = error(max_completion_tokens=0)
    assert limit.param == "max_completion_tokens" and "max_completion_tokens=0" in limit.message
    assert error(extra_body={"kv_floor": "int3"}).param == "kv_floor"
    assert error(n=65, temperature=1).param == "n"
    assert error(tool_choice="required", tools=[]).param == "tool_choice"
    assert error(tool_choice="some").code == "unsupported_parameter"
    assert error(response_format={"type": "xml"}).param == "response_format.type"
    assert error(response_format={"type": "json_schema"}).param == "response_format.json_schema"
    schema = {"name": "s", "schema": {"type": "nope"}}
    wrong = error(response_format={"type": "json_schema", "json_schema": schema})
    assert wrong.param == "response_format" and "Invalid type: nope" in wrong.message
    schema = {"name": "s", "schema": {"enum": ["x" * 70_000]}}
    long = error(response_format={"type": "json_schema", "json_schema": schema})
    assert long.param == "response_format.json_schema.schema"
    ours = {"structured_outputs": {"regex": "("}}
    assert error(extra_body=ours).param == "structured_outputs"
    both = error(extra_body=ours, response_format={"type": "json_object"})
    assert both.param == "structured_outputs" and "response_format" in both.message


def test_tools_reach_the_template_of_a_model_that_has_one(server: Running):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    answer = server.openai.chat.completions.create(model="demo", messages=HELLO, tools=tools, tool_choice="auto")
    assert answer.choices[0].message.content == "4042" and answer.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="object"):
        server.openai.chat.completions.create(model="demo", messages=HELLO, tools=["add"])


def test_calls_and_their_results_come_back_to_the_template(server: Running):
    function = {"name": "add", "arguments": '{"a": 1}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    messages = [*HELLO, called, {"role": "tool", "tool_call_id": "1", "content": "2"}, *HELLO]
    answer = server.openai.chat.completions.create(model="demo", messages=messages)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content
    assert server.post({"messages": messages}, "/tokenize").json()["count"] == answer.usage.prompt_tokens


def test_many_streams_at_once_give_what_they_give_alone(server: Running):
    questions = [f"What is {number}+{number}?" for number in range(10, 26)]

    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(model="demo", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    alone = [output.text for output in server.engine.chat([[{"role": "user", "content": q}] for q in questions])]
    assert asyncio.run(ask_all()) == alone


def test_text_becomes_tokens_and_text_again(server: Running):
    found = server.post({"prompt": "Hello, 47!"}, "/tokenize").json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == server.engine.max_model_len
    assert server.post({"tokens": found["tokens"]}, "/detokenize").json() == {"prompt": "Hello, 47!"}
    chat = server.post({"messages": HELLO}, "/tokenize").json()["tokens"]
    assert chat == server.engine.chat(HELLO, server.engine.params(max_tokens=1)).prompt_token_ids
    for body, path in ({"tokens": [-1]}, "/detokenize"), ({"tokens": [10**9]}, "/detokenize"), ({}, "/tokenize"):
        assert server.post(body, path).status_code == 400


def test_an_answer_has_the_form_asked_for(server: Running):
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
        "required": ["sum", "unit"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {"model": "demo", "messages": HELLO, "response_format": form, "temperature": 2.0, "n": 3, "seed": 1}
    for choice in server.openai.chat.completions.create(**asked, max_tokens=1000).choices:
        found = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and type(found["sum"]) is int and found["unit"] in ("m", "km")
    body = {"prompt": "Hi", "structured_outputs": {"regex": "[A-C]{4}-x"}, "temperature": 5}
    assert re.fullmatch("[A-C]{4}-x", server.post(body).json()["choices"][0]["text"])
