"""What those who run the server use: probes, the description of its paths, refusals, the access log."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from qkv_engine import Engine
from qkv_engine.serve.app import make_app
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.openapi import BODIES

from .running import ENDLESS_BODY, HELLO, Running, running

KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def document(server: Running) -> dict:
    return server.http.get("/openapi.json").json()


def test_probes_tell_the_living_from_the_ready(demo_engine: Engine):
    probes = {"/health": 200, "/live": 200, "/ready": 503, "/ping": 503}
    with running(demo_engine, keys=Keys([("me", KEY)])) as server:  # probes have none
        assert {path: server.http.get(path).status_code for path in probes} == dict.fromkeys(probes, 200)
        headers = {"authorization": f"Bearer {KEY}"}
        stream = server.http.stream("POST", "/v1/completions", json={**ENDLESS_BODY, "stream": True}, headers=headers)
        with stream as lines, httpx.Client(base_url=server.url) as other:
            next(lines.iter_lines())
            server.frontend.is_stopping = True  # as from a signal on
            assert {path: other.get(path).status_code for path in probes} == probes
            refused = other.get("/ready")
            assert refused.json()["error"]["code"] == "server_stopping"
            assert refused.headers["connection"] == "close"


def test_no_probe_passes_once_the_engine_has_stopped():
    engine = Engine(kv="fp32", kv_memory="64MiB", max_num_seqs=4)
    with running(engine) as server:
        engine.close()
        for path in ("/health", "/live", "/ready", "/ping"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            if name == "$ref" and isinstance(each, str):
                yield each
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_all_paths_are_described(demo_engine: Engine, document: dict):
    app = make_app(demo_engine, ["demo"], page=False)
    paths = {route.path.replace(":path", "") for route in app.routes}
    assert set(document["paths"]) == paths and "/openapi.json" in paths
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names) and all(each["summary"] for each in operations)
    assert all("500" in each["responses"] for each in operations)
    with running(demo_engine, admin_key=KEY) as server:
        with_key = server.http.get("/openapi.json").json()["paths"]
    assert set(with_key) == paths | {f"/admin/{name}" for name in ("resize", "sleep", "wake")}
    assert ["requestBody" in with_key[f"/admin/{name}"]["post"] for name in ("resize", "sleep", "wake")] == [1, 0, 0]
    assert "409" in with_key["/admin/wake"]["post"]["responses"]


def test_every_reference_of_the_description_leads_somewhere(document: dict):
    for name in references(document):
        value = document
        for part in name.removeprefix("#/").split("/"):
            value = value[part]
        assert value
    for path, kind in BODIES.items():
        if path in document["paths"]:
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
            assert set(fields) == {field.encode_name for field in msgspec.structs.fields(kind)}


def test_every_post_takes_a_body_that_is_described(document: dict):
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts <= set(BODIES), "a path is missing in serve/openapi.py:BODIES"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "makes no embeddings"),
        ("/v1/rerank", "ranks no texts"),
        ("/v1/images/generations", "makes no images"),
        ("/v1/audio/transcriptions", "neither hears nor speaks"),
        ("/v1/files", "takes no files"),
        ("/v1/files/file-1/content", "takes no files"),
        ("/v1/batches", "takes no files"),
        ("/v1/moderations", "ask the model"),
        ("/v1/fine_tuning/jobs/a/b/c/d", "trains no models"),
        ("/v1/threads/x/runs", "keeps no threads"),
        ("/chat/completions", "ends in /v1"),
        ("/v1/v1/chat/completions", "once"),
        ("/generate", "use /v1/completions"),
        ("/api/chat", "Ollama"),
        ("/livez", "use /live"),
        ("/docs", "/openapi.json"),
    ],
)
def test_what_is_not_offered_says_what_to_call(server: Running, path: str, words: str):
    for answer in (server.post({}, path), server.http.get(path + "/")):
        error = answer.json()["error"]
        assert answer.status_code == 404 and words in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "not_offered")


def test_a_typo_is_another_error(server: Running):
    for path in ("/v1/chat/completion", "/v1/embeddingsx", "/", "/v1", "/v1/" + "x/" * 3000):
        error = server.post({}, path).json()["error"]
        assert error["code"] in ("unknown_url", None) and len(error["message"]) < 200


def test_a_chat_s_reasoning_is_counted_and_has_both_names(server: Running):
    whole = server.post({"messages": HELLO}, "/v1/chat/completions").json()
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert message["reasoning"] == message["reasoning_content"]
    number = usage["completion_tokens_details"]["reasoning_tokens"]
    output = server.engine.chat(HELLO)
    closing = output.token_ids.index(server.engine.tokenizer.encode("</think>")[0])
    assert number == output.outputs[0].num_reasoning_tokens == closing + 1 < usage["completion_tokens"]
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 40}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * 40
    assert server.post({"prompt": "Hi"}).json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_rules_for_the_next_token_reach_the_engine(server: Running):
    ruled = server.post({"prompt": [9, 8, 9], "no_repeat_ngram_size": 1, "max_tokens": 30, "return_token_ids": True})
    ids = [9, 8, *ruled.json()["choices"][0]["token_ids"]]
    assert len(set(ids)) == len(ids) > 3
    refused = server.post({"prompt": "Hi", "no_repeat_ngram_size": 65})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "no_repeat_ngram_size"


def access_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "qkv_engine.access"]


def test_the_access_log_has_a_line_a_request_and_nothing_that_was_said(
    server: Running, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="qkv_engine.access"):
        headers = {"x-request-id": "mine 1", "authorization": "Bearer secret-of-mine"}
        server.http.post("/v1/completions?key=secret", json={"prompt": "whispered"}, headers=headers)
        server.http.get("/a%0Ab", headers={"x-request-id": "mine-2"})
        server.http.get("/" + "x" * 5000)
        deadline = time.monotonic() + 10  # a line is written behind the answer
        while len(access_lines(caplog)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    records = access_lines(caplog)
    first, second, third = (record.fields for record in records)
    assert {name: first[name] for name in ("client", "method", "path", "status", "request_id")} == {
        "client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200, "request_id": "mine 1",
    }  # fmt: skip
    assert 0 < first["ms"] < 60_000
    assert (second["path"], second["status"]) == ("/a%0Ab", 404) and len(third["path"]) == 200
    assert records[1].getMessage().startswith('127.0.0.1 "GET /a%0Ab" 404 ')
    assert records[1].getMessage().endswith(" ms mine-2")
    assert "secret" not in caplog.text and "whispered" not in caplog.text


def test_a_client_that_leaves_is_in_the_access_log(server: Running, caplog: pytest.LogCaptureFixture):
    logged = threading.Event()
    logger = logging.getLogger("qkv_engine.access")
    handler = logging.Handler()
    handler.emit = lambda record: logged.set() if record.fields["status"] == 499 else None
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="qkv_engine.access"):
            body = json.dumps(ENDLESS_BODY).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection = server.raw(head + body)
            while not server.engine.stats().num_running:
                pass
            connection.close()
            assert logged.wait(10)
    finally:
        logger.removeHandler(handler)
