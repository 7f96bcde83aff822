"""A bare shape behind the server: token ids in and out, and errors where a text would be needed."""

from __future__ import annotations

import json

from qkv_engine import Engine

from .running import HELLO, running


def test_a_shape_without_a_tokenizer_takes_and_gives_token_ids():
    with Engine("demo", load_format="random", kv_memory="64MiB") as engine, running(engine) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True, "logprobs": 1, "temperature": 0}
        choice = server.post({**body, "echo": True}).json()["choices"][0]
        assert choice["text"] == "" and choice["token_ids"][:3] == [5, 6, 7] and len(choice["token_ids"]) == 6
        assert len(choice["logprobs"]["token_logprobs"]) == 6
        with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            *chunks, done = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        ids = [token for chunk in chunks for token in json.loads(chunk)["choices"][0]["token_ids"]]
        assert ids == choice["token_ids"][3:] and done == "[DONE]"
        refused = [
            server.post({"prompt": "Hi"}),
            server.post({"messages": HELLO}, "/v1/chat/completions"),
            server.post({"prompt": "Hi"}, "/tokenize"),
            server.post({"input": "Hi"}, "/v1/responses"),
            server.post({"messages": HELLO, "max_tokens": 1}, "/v1/messages"),
            server.post({"messages": HELLO}, "/v1/messages/count_tokens"),
            server.post({**body, "structured_outputs": {"regex": "a"}}),
        ]
        assert all(answer.status_code == 400 and "tokenizer" in answer.text for answer in refused)
