"""Keys and tenants, CORS, health, metrics, tools of models that write them, shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import msgspec
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from qkv_engine import ConfigError, Engine, __version__
from qkv_engine.serve.app import make_app
from qkv_engine.serve.keys import Keys, read_keys
from qkv_engine.serve.limits import Limits
from qkv_engine.serve.metrics import Metrics
from qkv_engine.serve.server import Server, bind
from qkv_engine.sizes import parse_seconds

from .running import ENDLESS_BODY, HELLO, Running, running

ALICE, BOB = "alice-secret-1", "bob-secret-22"


@pytest.fixture(scope="module")
def guarded(demo_engine: Engine) -> Iterator[Running]:
    keys = Keys([("alice", ALICE), ("bob", BOB)])
    with running(demo_engine, keys=keys, allow_origins=["https://ours.example"]) as found:
        yield found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_path_but_health_and_ready_wants_a_key(guarded: Running):
    for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/nothing"):
        refused = guarded.http.get(path)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    for wrong in ("", "Bearer", bearer(ALICE[:-1])["authorization"], f"Basic {ALICE}", "Bearer \xff", ALICE):
        headers = {"authorization": wrong.encode("latin-1")}
        assert guarded.http.get("/v1/models", headers=headers).status_code == 401
    assert guarded.http.get("/v1/models", headers=bearer(BOB)).status_code == 200
    assert [guarded.http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200, 200, 401]
    with pytest.raises(openai.AuthenticationError):
        guarded.openai.models.list()


def test_a_key_s_tenant_is_counted_and_shares_no_prefixes(guarded: Running, monkeypatch: pytest.MonkeyPatch):
    seen = []
    stream = guarded.engine.stream
    monkeypatch.setattr(guarded.engine, "stream", lambda p, params, **o: seen.append(params) or stream(p, params, **o))
    body = {"prompt": "x " * 400, "max_tokens": 1, "tenant": "bob", "cache_salt": "own"}
    cached = [
        guarded.http.post("/v1/completions", json=body, headers=bearer(key)).json()["usage"]["prompt_tokens_details"]
        for key in (ALICE, ALICE, BOB)
    ]
    assert [params.tenant for params in seen] == ["alice", "alice", "bob"]
    assert [details["cached_tokens"] > 0 for details in cached] == [False, True, False]


def test_figures_of_all_tenants_are_for_the_first_one(guarded: Running, server: Running):
    """Bob would learn the length of Alice's prompt, and whether it was cached."""
    for path in ("/stats", "/metrics"):
        assert guarded.http.get(path, headers=bearer(ALICE)).status_code == 200
        refused = guarded.http.get(path, headers=bearer(BOB))
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "operator_only"
        assert server.http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "session", "retain"),
    [
        ("completions", {"session": "one", "retain": "10min"}, "one", 600),
        ("completions", {"prompt_cache_key": "two", "prompt_cache_retention": "24h"}, "two", 86_400),
        ("chat/completions", {"prompt_cache_key": "two", "prompt_cache_retention": "in_memory"}, "two", None),
        ("responses", {"prompt_cache_key": "two", "prompt_cache_retention": "24h"}, "two", 86_400),
        ("messages", {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}, "", 300),
        ("messages", {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
                      "retain": 7}, "", 7),
    ],
)  # fmt: skip
def test_hints_of_other_apis_reach_the_engine(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, object],
    session: str,
    retain: float | None,
):
    seen = []
    stream = server.engine.stream
    monkeypatch.setattr(server.engine, "stream", lambda p, params, **o: seen.append(params) or stream(p, params, **o))
    messages = [{"role": "user", "content": "Hi"}]
    prompt = {"completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}.get(path, {"messages": messages})
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = server.http.post(f"/v1/{path}", json={limit: 16 if path == "responses" else 1} | prompt | fields)
    assert answer.status_code == 200, answer.text
    assert [(params.session, parse_seconds(params.retain)) for params in seen] == [(session, retain)]


def test_two_salts_under_one_key_share_nothing(guarded: Running):
    body = {"prompt": "y " * 400, "max_tokens": 1}
    asked = [body | {"cache_salt": salt} for salt in ("one", "one", "two")] + [body, body]
    usages = [guarded.http.post("/v1/completions", json=each, headers=bearer(ALICE)).json()["usage"] for each in asked]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in usages]
    assert cached == [False, True, False, False, True]


def test_priorities_order_requests_and_no_tenant_goes_before_the_others(server: Running, guarded: Running):
    body = {"prompt": "Hi", "max_tokens": 1, "priority": -1}
    assert server.post(body).status_code == 200
    refused = guarded.http.post("/v1/completions", json=body, headers=bearer(ALICE))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    allowed = guarded.http.post("/v1/completions", json=body | {"priority": 3}, headers=bearer(ALICE))
    assert allowed.status_code == 200


def test_a_key_file_names_tenants(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\nalice {ALICE}\n\n{BOB}\n")
    keys = Keys(read_keys(path))
    assert keys.tenant_of(f"Bearer {ALICE}") == "alice" and keys.tenant_of(f"bearer {BOB}") == "key-4"
    assert keys.tenant_of(None) is keys.tenant_of("Bearer x") is None
    assert [keys.is_operator(tenant) for tenant in ("alice", "key-4", "", None)] == [True, False, False, False]
    alone = Keys([("alice", ALICE), ("alice", BOB)])  # two keys, one tenant: nobody to leave places or seats to
    assert alone.num_tenants == 1 and alone.tenant_of(f"Bearer {BOB}") == "" and alone.tenant_of("Bearer x") is None
    assert [alone.is_operator(tenant) for tenant in ("", None)] == [True, False]
    for text in ("", "a b c\n", "short\n"):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            Keys(read_keys(path))
        assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_pages_of_other_sites_may_not_call(guarded: Running, server: Running):
    asked = {"origin": "https://ours.example", "access-control-request-method": "POST"}
    assert guarded.http.options("/v1/completions", headers=asked).headers["access-control-allow-origin"]
    answer = guarded.http.get("/v1/models", headers={**bearer(ALICE), "origin": asked["origin"]})
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = guarded.http.options("/v1/completions", headers={**asked, "origin": "https://theirs.example"})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in server.http.get("/health", headers=asked).headers


def test_metrics_are_prometheus_text_of_what_happened(demo_engine: Engine):
    with running(demo_engine) as server:
        server.openai.chat.completions.create(model="demo", messages=HELLO)
        server.post({"prompt": 1})
        families = {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    samples = {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert all(sample.labels["model_name"] == "demo" for family in families.values() for sample in family.samples)
    assert samples["qkv:request_success_total", "stop"] == 1 and samples["qkv:http_responses_total", "400"] == 1
    assert samples[("qkv:time_to_first_token_seconds_count",)] == 1
    tokens = len(demo_engine.chat(HELLO).token_ids)
    assert samples[("qkv:inter_token_latency_seconds_count",)] == tokens - 1
    assert samples[("qkv:request_generation_tokens_sum",)] == tokens
    assert samples[("qkv:num_requests_running",)] == 0
    total, parts = samples[("qkv:kv_capacity_bytes",)], ("used", "cached", "free")
    assert sum(samples[(f"qkv:kv_{part}_bytes",)] for part in parts) == total == demo_engine.stats().kv_bytes_total
    assert samples[("qkv:kv_effective_bits",)] == 32 and ("qkv:kv_blocks", "dense32") in samples
    assert families["qkv:kv_demotions"].type == "counter" and families["qkv:kv_cache_usage_perc"].type == "gauge"


def test_a_plan_s_basis_miss_is_a_gauge_once_there_is_one(demo_engine: Engine):
    stats = demo_engine.stats()
    assert stats.basis_miss is None
    for miss in (None, 1.5):
        engine = SimpleNamespace(stats=lambda miss=miss: msgspec.structs.replace(stats, basis_miss=miss))
        found = Metrics(cast(Engine, engine), "demo").render()
        assert (b'qkv:kv_basis_miss{model_name="demo"} 1.5' in found) is (miss is not None)


def test_demotions_are_counted_by_step_and_bits_stand_in_usage():
    with (
        Engine(kv="auto", kv_memory="8MiB", dtype="float32", max_num_seqs=4, max_model_len=800) as engine,
        running(engine) as server,
    ):
        prompts = [[i * 7 % 900 + 20 + j for i in range(500)] for j in range(3)]
        usage = server.post({"prompt": prompts, "max_tokens": 8, "ignore_eos": True}).json()["usage"]
        families = {f.name: f for f in text_string_to_metric_families(server.http.get("/metrics").text)}
        pinned = server.post({"prompt": prompts[0], "max_tokens": 8, "kv_pinned": True}).json()["usage"]
        again = server.post({"prompt": prompts[0], "max_tokens": 8}).json()["usage"]["prompt_tokens_details"]
        after = {f.name: f for f in text_string_to_metric_families(server.http.get("/metrics").text)}
    steps = {(s.labels["from_rung"], s.labels["to_rung"]): s.value for s in families["qkv:kv_demotions"].samples}
    assert steps["dense16", "int8"] > 0 and steps["int8", "int4"] > 0
    assert usage["kv_bits"] == 4 and usage["kv_blocks"]["int4"] > 0 and usage["kv_blocks"]["dense16"] >= 3
    assert pinned["kv_bits"] == 16
    hits = {s.labels["rung"]: s.value for s in after["qkv:prefix_cache_hits_by_rung"].samples}
    assert sum(again["cached_tokens_by_rung"].values()) == again["cached_tokens"] == 32 + 3 * 128
    assert all(hits[rung] >= number for rung, number in again["cached_tokens_by_rung"].items())
    assert sum(s.value for s in after["qkv:kv_idle_demotions"].samples) > 0


def test_a_dead_engine_is_a_503_everywhere():
    engine = Engine(kv="fp32", kv_memory="64MiB", max_num_seqs=4)
    with running(engine) as server:
        lines: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with server.http.stream("POST", "/v1/completions", json={**ENDLESS_BODY, "stream": True}) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(10)
        engine.close()
        reader.join(10)
        assert "engine_dead" in "".join(lines) and lines[-2:] == ["data: [DONE]", ""]
        answers = [server.http.get("/health"), server.http.get("/metrics"), server.post({"prompt": "Hi"})]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert answers[2].json()["error"]["code"] == "engine_dead"


def test_an_unforeseen_error_is_a_500_with_an_id_alone(server: Running, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(type(server.frontend), "check_model", lambda *_: 1 / 0)
    answer = server.post({"prompt": "Hi"})
    error = answer.json()["error"]
    assert answer.status_code == 500 and "ZeroDivision" not in answer.text and error["type"] == "server_error"
    assert answer.headers["x-request-id"] in error["message"] and answer.headers["x-request-id"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_stopping_lets_requests_finish(demo_engine: Engine):
    with running(demo_engine) as server:
        with server.http.stream(
            "POST", "/v1/completions", json={**ENDLESS_BODY, "max_tokens": 150, "stream": True}
        ) as r:
            lines = r.iter_lines()
            next(lines)
            server.server.stop()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        deadline = time.monotonic() + 10
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline:
                server.raw().close()


def test_a_server_that_stops_says_so_until_its_last_request_has_ended(demo_engine: Engine):
    with running(demo_engine) as server:
        assert server.http.get("/ready").status_code == 200
        stream = {**ENDLESS_BODY, "stream": True}
        with httpx.Client(base_url=server.url) as other, other.stream("POST", "/v1/completions", json=stream) as r:
            lines = r.iter_lines()  # the connection closes with it
            next(lines)
            server.server.stop()
            deadline = time.monotonic() + 10
            while (answer := server.http.get("/ready")).status_code == 200 and time.monotonic() < deadline:
                pass
            assert answer.status_code == 503 and answer.headers["connection"] == "close"
            refused = server.post({"prompt": "Hi"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_stopping"
            assert server.http.get("/health").status_code == 200


def test_version(server: Running):
    assert server.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("name", ["my-id-1", "x" * 128, "two words"])
def test_a_client_s_name_of_its_request_is_kept(server: Running, name: str):
    headers = {"x-request-id": name}
    answers = [server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers) for _ in range(2)]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [[name]] * 2
    assert name not in answers[0].json()["id"]
    assert server.http.get("/nothing", headers={"x-request-id": name}).headers["x-request-id"] == name


@pytest.mark.parametrize("name", [b"", b"x" * 129, b"\xe4", b"a\tb"])
def test_another_name_is_replaced(server: Running, name: bytes):
    given = server.http.get("/health", headers={"x-request-id": name}).headers["x-request-id"]
    assert len(given) == 32 and given.isalnum()


def test_what_does_not_finish_in_time_is_aborted(demo_engine: Engine, caplog: pytest.LogCaptureFixture):
    with (
        running(demo_engine, limits=Limits(drain_timeout=0.3)) as server,
        server.http.stream("POST", "/v1/completions", json={**ENDLESS_BODY, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.server.stop()
        begin = time.monotonic()
        *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping" and done == "data: [DONE]"
        assert time.monotonic() - begin < 5
    assert "requests under way: 1, which have 0.3 s to finish" in caplog.text and "Traceback" not in caplog.text
    server.wait_until_idle(5)


def test_an_answer_that_is_not_begun_in_time_is_a_503(demo_engine: Engine, caplog: pytest.LogCaptureFixture):
    with running(demo_engine, limits=Limits(drain_timeout=0.3)) as server:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.post(ENDLESS_BODY)))
        asking.start()
        while not demo_engine.stats().num_running:
            time.sleep(0.005)
        server.server.stop()
        asking.join(10)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "server_stopping"
    assert "Traceback" not in caplog.text
    server.wait_until_idle(5)


def test_a_signal_before_the_server_has_begun_leaves_no_warning(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    def interrupted(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        made = self.serve(sockets)
        assert asyncio.iscoroutine(made)
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", interrupted)
    with bind("127.0.0.1", 0) as sock, pytest.raises(KeyboardInterrupt):
        Server(make_app(demo_engine, ["demo"]), sock, Limits()).run()
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


def test_a_port_in_use_is_refused():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            bind("127.0.0.1", sock.getsockname()[1])
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(ConfigError):
            bind(host, port)


@pytest.mark.parametrize("name", ["max_requests", "max_body", "read_timeout", "drain_timeout"])
def test_limits_are_positive(name: str):
    for value in (0, -1) if name.startswith("max") else (0, -1, float("nan"), 1e9):
        with pytest.raises(ConfigError, match=name):
            Limits(**{name: value})
