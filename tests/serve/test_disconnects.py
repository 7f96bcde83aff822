"""Clients that leave: their requests are aborted, and no block, task, connection or descriptor is left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Iterator

import httpx
import pytest

from qkv_engine import Engine

from .running import ENDLESS_BODY, Running, running

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(small_engine: Engine) -> Iterator[Running]:
    with running(small_engine) as found:
        yield found


def num_running(server: Running) -> int:
    stats = server.engine.stats()
    return stats.num_running + stats.num_waiting


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("extra", [{}, {"n": 2, "temperature": 1}, {"prompt": ["Hello", "Hi"]}])
def test_leaving_a_stream_aborts_its_requests(server: Running, extra: dict[str, object]):
    with server.http.stream("POST", COMPLETIONS, json={**ENDLESS_BODY, "stream": True, **extra}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert num_running(server) == 1 + bool(extra)
    server.wait_until_idle(5)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_answer_aborts_the_request(server: Running, stream: bool):
    body = httpx.Request("POST", server.url, json={**ENDLESS_BODY, "stream": stream}).content
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_for(lambda: num_running(server) == 1)
    connection.close()
    server.wait_until_idle(5)
    assert "abort" in server.http.get("/metrics").text


def test_leaving_in_the_middle_of_a_body_leaves_nothing(server: Running):
    connection = server.raw(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n")
    connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
    connection.close()
    wait_for(lambda: server.http.get("/health").status_code == 200)


def test_a_cancelled_call_of_the_async_client_aborts(server: Running):
    import openai

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            call = client.completions.create(model="demo", prompt="Hello", max_tokens=4000, extra_body=ENDLESS_BODY)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, timeout=0.3)

    asyncio.run(leave())
    server.wait_until_idle(5)


async def visit(client: httpx.AsyncClient, rng: random.Random) -> None:
    """A request that is left at a random moment, before, within or after its answer."""
    body = {
        "prompt": "Hello " * rng.randint(1, 60),
        "max_tokens": rng.randint(1, 40),
        "stream": rng.random() < 0.7,
        "ignore_eos": True,
        "n": rng.choice([1, 1, 3]),
        "temperature": 1,
    }
    try:
        async with asyncio.timeout(rng.choice([0.0, 0.002, 0.01, 0.05, 0.2, 5])):
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                assert response.status_code == 200
                async for _ in response.aiter_bytes():
                    if rng.random() < 0.1:
                        return
    except (TimeoutError, httpx.TransportError):
        pass


async def visit_often(url: str, number: int, at_once: int) -> None:
    rng, room = random.Random(number), asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:

        async def one() -> None:
            async with room:
                await visit(client, rng)

        await asyncio.gather(*(one() for _ in range(number)))


@pytest.mark.parametrize("number", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_disconnects_leave_nothing(small_engine: Engine, number: int):
    with running(small_engine) as server:  # opens what a process opens once
        asyncio.run(visit_often(server.url, 20, at_once=8))
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    with running(small_engine) as server:
        asyncio.run(visit_often(server.url, number, at_once=32))
        server.wait_until_idle(60)
        state = server.server._server.server_state
        wait_for(lambda: not state.tasks and not state.connections)
        assert not small_engine._started.core.live
    gc.collect()
    left = set(os.listdir("/proc/self/fd")) - set(descriptors)
    assert not [os.readlink(f"/proc/self/fd/{number}") for number in left if os.path.exists(f"/proc/self/fd/{number}")]
