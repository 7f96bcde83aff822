"""Malformed requests and slow or greedy clients: errors in OpenAI's shape, connections cut off, the engine unharmed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from qkv_engine import Engine
from qkv_engine.serve.connection import MAX_HEADER_BYTES, LimitedConnection
from qkv_engine.serve.limits import Limits

from .running import ENDLESS_BODY, HELLO, Running, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
VALID = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()


def head(path: str = COMPLETIONS, **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def error_of(response) -> dict[str, object]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *((body, None) for body in (b"", b"{", b"nope", b'{"prompt": "Hi"} x', b"\xff\xfe", b"[]", b"1", b"\x00")),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": ' + b"[" * 8000, None),
        (b'{"other": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
        (b"{}", None),
        (b'{"prompt": 1}', "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [[]]}', "prompt"),
        (b'{"prompt": [{"role": "user"}]}', "prompt[0]"),
        (b'{"prompt": [[[1]]]}', "prompt[0]"),
        (b'{"prompt": [1, "Hi"]}', "prompt"),
        (b'{"prompt": [true]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": [99999999999999999999]}', "prompt"),
        (b'{"prompt": "Hi", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "Hi", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "Hi", "max_tokens": "1"}', "max_tokens"),
        (b'{"prompt": "Hi", "temperature": 1e400}', "temperature"),
        (b'{"prompt": "Hi", "temperature": NaN}', None),
        (b'{"prompt": "Hi", "logprobs": 21}', "logprobs"),
        (b'{"prompt": "Hi", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "Hi", "logit_bias": {"999999": 1}}', "logit_bias"),
        (b'{"prompt": "Hi", "stop": [1]}', "stop[0]"),
        (b'{"prompt": "Hi", "stop": [""]}', "stop"),
        (b'{"prompt": "Hi", "stream": "yes"}', "stream"),
        (b'{"prompt": "Hi", "stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        (b'{"prompt": "Hi", "seed": 9223372036854775808}', "seed"),
        (b'{"prompt": "Hi", "best_of": 2}', "best_of"),
        (b'{"prompt": "Hi", "suffix": "x"}', "suffix"),
        (b'{"prompt": "Hi", "priority": 2147483648}', "priority"),
        (b'{"prompt": "Hi", "priority": 0.5}', "priority"),
        (b'{"prompt": "Hi", "cache_salt": "\\u0000"}', "cache_salt"),
    ],
)
def test_a_malformed_body_is_a_400_that_names_the_field(server: Running, body: bytes, param: str | None):
    response = server.http.post(COMPLETIONS, content=body, headers=JSON)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param, error


@pytest.mark.parametrize("message", [1, "Hi", {}, {"role": 1}, {"role": "user", "content": [1]}, {"content": "Hi"}])
def test_a_malformed_message_is_a_400_that_names_it(server: Running, message: object):
    response = server.post({"messages": [message]}, CHAT)
    assert response.status_code == 400 and str(error_of(response)["param"]).startswith("messages[")


def test_unknown_fields_and_nulls_are_ignored(server: Running):
    fields = ("n", "stream", "stop", "logprobs", "temperature", "logit_bias", "stream_options", "seed", "kv_floor")
    body = {"prompt": "Hi", "max_tokens": 1, "user": "me", "made_up": [{}], **dict.fromkeys(fields)}
    assert server.post(body).status_code == 200


def test_random_bytes_and_values_never_break_the_server(server: Running):
    rng = random.Random(5)
    values = [None, True, -1, 0, 1.5, 10**30, "", "x", [], [0], {}, {"a": 1}, [[]], "\u0000"]
    names = ["n", "stop", "seed", "top_p", "logprobs", "logit_bias", "min_tokens", "stop_token_ids", "kv_pinned"]
    for _ in range(100):
        body = {"prompt": rng.choice(["Hi", *values]), "max_tokens": 2}
        body |= {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(3))}
        content = bytearray(json.dumps(body).encode())
        if rng.random() < 0.3:
            content[rng.randrange(len(content))] = rng.randrange(256)
        response = server.http.post(COMPLETIONS, content=bytes(content), headers=JSON)
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            error_of(response)


def test_other_paths_methods_and_media_types_are_refused(server: Running):
    assert error_of(server.http.get("/v1/nothing"))["message"] == "Not Found: GET /v1/nothing"
    response = server.http.get(CHAT)
    assert response.status_code == 405 and "POST" in response.headers["allow"] and error_of(response)
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": media_type}
        assert server.http.post(COMPLETIONS, content=VALID, headers=headers).status_code == 200  # as of ``curl -d``
        for origin in ("https://theirs.example", "null"):
            response = server.http.post(COMPLETIONS, content=VALID, headers=headers | {"origin": origin})
            assert response.status_code == 415 and error_of(response)
    utf8 = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post(COMPLETIONS, content=VALID, headers=utf8).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/embeddings/", "/v1/rerank"])
def test_paths_that_are_not_there_say_what_is(server: Running, path: str):
    refused = server.post({"model": "demo"}, path)
    assert refused.status_code == 404 and "/v1/chat/completions" in str(error_of(refused)["message"])


def test_errors_name_the_fields_of_the_body(server: Running):
    long = "12 " * 9000
    too_long = [server.post({"prompt": long}), server.post({"messages": [{"role": "user", "content": long}]}, CHAT)]
    too_long.append(server.post({"prompt": [5] * 9000}))
    for refused, param in zip(too_long, ("prompt", "messages", "prompt"), strict=True):
        error = error_of(refused)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "max_model_len" not in str(error["message"]) and "context of 8192" in str(error["message"])
    picture = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}},
    ]
    error = error_of(server.post({"messages": [{"role": "user", "content": picture}]}, CHAT))
    assert error["param"] == "messages[0].content[1]" and "image_url is not supported" in str(error["message"])
    assert "{" not in str(error["message"])


def test_equal_choices_without_a_temperature(server: Running):
    choices = server.post({"messages": HELLO, "n": 2, "temperature": 0}, CHAT).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["message"]["content"] for choice in choices} == {"4042"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_s_own_form_is_a_400_that_names_the_field(
    server: Running, caplog: pytest.LogCaptureFixture, stream: bool
):
    """Beyond the library's limits at a later token, too deep for it, or of no text at all."""
    alternatives = "start: " + " | ".join(f'"x{i}"' for i in range(5000))
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1400)} | {"d1400": {"type": "integer"}}

    def schema(value: object) -> dict[str, object]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}

    forms = [{"structured_outputs": {"grammar": alternatives}}, schema({"$ref": "#/$defs/d0", "$defs": chain})]
    forms += [schema({"$ref": "#"})]
    for form, param in zip(forms, ("structured_outputs", "response_format", "response_format"), strict=True):
        answer = server.post({"prompt": "x", "stream": stream, **form})
        if answer.status_code == 200:
            assert stream
            error = json.loads(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))["error"]
        else:
            error = error_of(answer)
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert error["message"].startswith(param) and "\n" not in error["message"] and len(error["message"]) < 300
    assert "Traceback" not in caplog.text


@pytest.fixture(scope="module")
def strict(demo_engine: Engine) -> Iterator[Running]:
    """A server of little patience."""
    limits = Limits(max_body=10_000, read_timeout=0.5, request_timeout=1)
    with running(demo_engine, limits=limits) as found:
        yield found


def seconds_until_closed(connection: socket.socket) -> float:
    begin = time.monotonic()
    with connection:
        while connection.recv(1 << 16):
            pass
    return time.monotonic() - begin


def closes(connection: socket.socket) -> bool:
    """Whether the server closes ``connection`` in good time."""
    try:
        return seconds_until_closed(connection) < 5
    except ConnectionError:
        return True


def test_slow_headers_end_the_connection(strict: Running):
    assert closes(strict.raw())  # says nothing
    assert closes(strict.raw(b"POST /v1/completions HTTP/1.1\r\nHost: lo"))
    after_a_request = strict.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n")
    assert closes(after_a_request)
    trickle = strict.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    begin = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() < begin + 5:
            trickle.sendall(b"x: y\r\n")
            time.sleep(0.05)
    trickle.close()


def test_a_slow_body_is_a_408(strict: Running):
    connection = strict.raw(head(content_length=100) + b'{"prompt"')
    assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    assert closes(connection)


def refusal(connection: socket.socket) -> tuple[int, dict[str, object]]:
    """The status and the error of the one response with which the server closes ``connection``."""
    with connection:
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    response = answer.partition(b"\r\n\r\n")
    return int(response[0].split()[1]), json.loads(response[2])["error"]


def test_a_flood_of_headers_ends_the_connection(strict: Running):
    status, error = refusal(strict.raw(b"GET /health HTTP/1.1\r\nx: " + b"y" * MAX_HEADER_BYTES))
    assert status == 431 and set(error) == {"message", "type", "param", "code"}


def test_a_flood_of_headers_behind_a_request_under_way_ends_the_connection(server: Running):
    body = json.dumps({**ENDLESS_BODY, "stream": True}).encode()
    connection = server.raw(head(content_length=len(body)) + body)
    assert b"200 OK" in connection.recv(1000)
    flood = (b"x: " + b"y" * 1000 + b"\r\n") * (MAX_HEADER_BYTES // 1000 + 1)
    connection.sendall(b"GET /health HTTP/1.1\r\n" + flood)
    assert closes(connection)


def test_what_is_not_http_is_a_400_in_openai_s_shape(server: Running):
    for data in (
        b"\x16\x03\x01\r\n\r\n",
        head(transfer_encoding="chunked") + b"zz\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    ):
        status, error = refusal(server.raw(data))
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", None)


@pytest.mark.parametrize("pause", [0, 0.05])
def test_an_offer_of_another_protocol_is_declined_and_its_body_read(server: Running, pause: float):
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAAQCAAAA"}
    connection = server.raw(head(content_length=len(VALID), **offer))
    time.sleep(pause)
    connection.sendall(VALID + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    connection.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 2 and b"text_completion" in answers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("connection", ["Upgrade", "Upgrade, close", "close, Upgrade"])
def test_an_offer_on_a_connection_that_closes_is_answered(server: Running, version: str, connection: str):
    """It once had no answer, since the parser took the request for bytes behind the connection's end."""
    lines = head(content_length=len(VALID), connection=connection, upgrade="h2c").replace(b"1.1", version.encode(), 1)
    with server.raw(lines + VALID) as client:
        client.settimeout(5)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_requests_behind_a_lost_connection_leave_no_traceback(server: Running, caplog: pytest.LogCaptureFixture):
    body = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
    for _ in range(20):
        client = server.raw((head(content_length=len(body)) + body) * 8)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends it by a reset
        client.recv(100)
        client.close()
    server.wait_until_idle()
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


@pytest.mark.parametrize("lacking", ["_spawn", "socket.socketpair"])
def test_no_process_for_a_request_is_the_server_s_lack(server: Running, monkeypatch: pytest.MonkeyPatch, lacking: str):
    def refuse(*given: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(f"qkv_engine.sandbox.process.{lacking}", refuse)
    server.engine.tokenizer.close()
    answer = server.post({"messages": HELLO}, CHAT)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("server_error", "unavailable") and "Errno" not in str(error["message"])


def test_a_large_body_is_a_413(strict: Running):
    announced = strict.http.post(COMPLETIONS, json={"prompt": "x" * 10_000})
    assert announced.status_code == 413 and error_of(announced)["code"] == "request_too_large"
    chunks = (b"x" * 1000 for _ in range(100))
    assert strict.http.post(COMPLETIONS, content=chunks, headers=JSON).status_code == 413
    with strict.raw(head(content_length=1_000_000) + b"x" * 100_000) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        for _ in range(4):  # a client that sends all before it reads
            connection.sendall(b"x" * 100_000)
            time.sleep(0.05)
    for length in ("-1", "x", "9" * 30):
        with strict.raw(head(content_length=length)) as connection:
            assert connection.recv(1000).split()[1] in (b"400", b"413")


def test_too_many_connections_are_closed_at_once(demo_engine: Engine):
    with running(demo_engine, limits=Limits(max_connections=4)) as server:
        connections = [server.raw() for _ in range(6)]
        assert closes(connections[-1])
        for connection in connections:
            connection.close()
        time.sleep(0.1)
        assert server.http.get("/health").status_code == 200


def test_more_requests_than_the_limit_are_a_429(demo_engine: Engine):
    with running(demo_engine, limits=Limits(max_requests=2)) as server:
        body = {**ENDLESS_BODY, "n": 2, "temperature": 1, "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body) as busy:
            lines = busy.iter_lines()
            next(lines)
            refused = server.post({"prompt": "Hi"})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
            assert error_of(refused)["type"] == "rate_limit_error"
        server.wait_until_idle()
        assert server.post({"prompt": "Hi", "max_tokens": 1}).status_code == 200
        assert error_of(server.post({"prompt": ["Hi"] * 3}))["param"] == "n"


def test_a_request_that_takes_too_long_is_ended(strict: Running):
    late = strict.post(ENDLESS_BODY)
    assert late.status_code == 504 and error_of(late)["code"] == "timeout"
    with strict.http.stream("POST", COMPLETIONS, json={**ENDLESS_BODY, "stream": True}) as stream:
        *_, error, done = [line for line in stream.iter_lines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout" and done == "data: [DONE]"
    strict.wait_until_idle()


def test_a_client_that_does_not_read_holds_nobody_up(demo_engine: Engine):
    with running(demo_engine, limits=Limits(read_timeout=0.5), send_buffer=4096) as server:
        body = json.dumps({**ENDLESS_BODY, "stream": True, "logprobs": 20}).encode()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        deaf.sendall(head(content_length=len(body)) + body)
        time.sleep(0.2)
        assert server.post({"messages": HELLO}, CHAT).json()["choices"][0]["message"]["content"] == "4042"
        server.wait_until_idle()  # its connection was cut off, and the request aborted
        deaf.close()


def test_a_slow_client_that_does_read_gets_all(demo_engine: Engine):
    """Each pause of its reading is shorter than the patience, all of them together are longer."""
    with running(demo_engine, limits=Limits(read_timeout=0.5), send_buffer=4096) as server:
        body = json.dumps({"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "logprobs": 20}).encode()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        slow.sendall(head(content_length=len(body), connection="close") + body)
        received, begin = b"", time.monotonic()
        while part := slow.recv(8192):
            received += part
            if time.monotonic() - begin < 1.5:
                time.sleep(0.2)
        slow.close()
        assert time.monotonic() - begin > 1 and received.endswith(b"}") and b'"finish_reason":"length"' in received


def test_a_client_has_new_time_with_each_pause_of_its_reading():
    async def pauses() -> None:
        connection = object.__new__(LimitedConnection)
        connection.loop, connection._limits = asyncio.get_running_loop(), Limits(read_timeout=0.05)
        connection.transport, connection.flow = Mock(), Mock()
        connection.pause_writing()
        connection.resume_writing()
        await asyncio.sleep(0.15)
        connection.transport.abort.assert_not_called()
        connection.pause_writing()
        await asyncio.sleep(0.15)
        connection.transport.abort.assert_called_once_with()

    asyncio.run(pauses())


def test_the_engine_answers_after_all_that(server: Running):
    answer = server.post({"messages": HELLO}, CHAT).json()
    assert answer["choices"][0]["message"]["content"] == "4042"
