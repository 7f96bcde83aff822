"""The front over replicas that are mere functions: what a client sees when one is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from qkv_engine.cli.main import main
from qkv_engine.cluster import placement
from qkv_engine.cluster.batch import prompt_of, refused
from qkv_engine.cluster.deployment import Replicas
from qkv_engine.cluster.front import REMEMBERED, Deaths, Front
from qkv_engine.cluster.placement import resources_of
from qkv_engine.cluster.replica import _Exchange, _joined
from qkv_engine.errors import ConfigError, RequestError
from qkv_engine.serve.errors import ApiError
from qkv_engine.serve.frontend import FIRST_TOKEN
from qkv_engine.serve.limits import Limits

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
Answer = Callable[[], AsyncIterator[list[dict[str, Any]]]]


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class FakeReplicas:
    """A deployment handle whose calls are answered by ``answers``, one after the other."""

    def __init__(self, *answers: Answer):
        self.answers, self.keys = list(answers), list[str]()

    def options(self, *, stream: bool, session_id: str) -> FakeReplicas:
        self.keys.append(session_id)
        return self

    @property
    def answer(self) -> FakeReplicas:
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> FakeReplicas:
        self.call = self.answers.pop(0)()
        return self

    def __aiter__(self) -> AsyncIterator[list[dict[str, Any]]]:
        return self.call

    def cancel(self) -> None:
        pass


async def whole() -> AsyncIterator[list[dict[str, Any]]]:
    yield [HEAD]
    yield [part(b"data: 1\n\n", True), part(b"data: [DONE]\n\n")]


async def lost_before() -> AsyncIterator[list[dict[str, Any]]]:
    yield [HEAD]
    raise ActorDiedError


async def lost_within() -> AsyncIterator[list[dict[str, Any]]]:
    yield [HEAD, part(b"data: 1\n\n", True)]
    raise ActorDiedError


async def full() -> AsyncIterator[list[dict[str, Any]]]:
    raise BackPressureError(num_queued_requests=9, max_queued_requests=9)
    yield []


async def lost_with_a_token() -> AsyncIterator[list[dict[str, Any]]]:
    yield [HEAD]
    yield [{"type": FIRST_TOKEN}]
    raise ActorDiedError


def post_all(
    replicas: FakeReplicas, *prompts: object, limits: Limits | None = None, **headers: str
) -> list[httpx.Response]:
    """The answers of one front to a completion of each prompt."""

    async def run() -> list[httpx.Response]:
        app = Front(replicas, Limits() if limits is None else limits).__serve_build_asgi_app__()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            return [
                await client.post("/v1/completions", json={"prompt": prompt}, headers=headers) for prompt in prompts
            ]

    return asyncio.run(run())


def post(replicas: FakeReplicas, limits: Limits | None = None, **headers: str) -> httpx.Response:
    return post_all(replicas, "Hello", limits=limits, **headers)[0]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_an_answer_passes_unchanged():
    answer = post(FakeReplicas(whole))
    assert (answer.status_code, answer.text) == (200, "data: 1\n\ndata: [DONE]\n\n")


def test_a_request_that_was_lost_before_its_first_chunk_is_sent_again():
    replicas = FakeReplicas(lost_with_a_token, whole)
    assert post(replicas).text == "data: 1\n\ndata: [DONE]\n\n"
    assert replicas.answers == [] and len(set(replicas.keys)) == 1


def test_it_is_sent_twice_at_most():
    replicas = FakeReplicas(lost_with_a_token, lost_with_a_token, whole)
    assert code_of(post(replicas)) == (503, "replica_lost")
    assert replicas.answers == [whole]


def test_a_request_that_was_lost_before_a_token_is_never_sent_again():
    """It may be what killed the replica: one such request once took two of them down."""
    replicas = FakeReplicas(lost_before, whole)
    assert code_of(post(replicas)) == (503, "replica_lost")
    assert replicas.answers == [whole]


def test_a_request_with_which_two_replicas_were_lost_reaches_no_third():
    replicas = FakeReplicas(lost_before, whole, lost_before, whole)
    answers = post_all(replicas, "kills", "another", "kills", "kills", "kills", "another")
    assert [code_of(answers[i])[0] for i in (0, 2, 3, 4)] == [503, 503, 400, 400]
    assert [answers[i].status_code for i in (1, 5)] == [200, 200] and replicas.answers == []


def test_an_answer_clears_a_request_whose_replica_was_lost():
    replicas = FakeReplicas(lost_before, whole, lost_before, whole)
    assert [answer.status_code for answer in post_all(replicas, *["Hello"] * 4)] == [503, 200, 503, 200]


def test_deaths_are_remembered_of_so_many_bodies():
    deaths = Deaths()
    for number in range(REMEMBERED + 1):
        deaths.note(b"%d" % number)
        deaths.note(b"%d" % number)
    deaths.check(b"0")
    with pytest.raises(ApiError, match="2 replicas"):
        deaths.check(b"1")


def test_a_stream_that_had_begun_ends_with_an_error():
    first, error, done = post(FakeReplicas(lost_within, whole)).text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_full_replicas_refuse():
    answer = post(FakeReplicas(full))
    assert answer.status_code == 429 and answer.headers["retry-after"]


def test_a_front_that_drains_cuts_the_late_and_refuses_the_new():
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[list[dict[str, Any]]]:
        yield [HEAD, part(b"data: 1\n\n", True)]
        begun.set()
        await asyncio.sleep(60)

    async def run() -> None:
        front = Front(FakeReplicas(endless), Limits())
        transport = httpx.ASGITransport(front.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            late = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Hello"}))
            await begun.wait()
            assert await front.drain(60) == 1
            refused = await client.post("/v1/completions", json={"prompt": "Hello"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] and not late.done()
            assert await front.drain(0) == 1
            first, error, done = (await late).text.strip().split("\n\n")
            assert (first, done) == ("data: 1", "data: [DONE]")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert await front.drain(0) == 0

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_body_that_is_too_long_or_takes_too_long_to_decode_reaches_no_replica():
    replicas = FakeReplicas()
    assert post(replicas, Limits(max_body=4)).status_code == 413
    assert [answer.status_code for answer in post_all(replicas, [1e300] * 3000, [[]] * 30_000)] == [413, 413]
    assert replicas.keys == []


def test_a_session_comes_before_the_prompt():
    replicas = FakeReplicas(whole)
    post(replicas, **{"X-Session-Id": "mine"})
    assert replicas.keys == ["mine"]


def test_numbers_of_replicas():
    assert Replicas.parse("3") == Replicas(3, 3)
    assert Replicas.parse("2..8") == Replicas(2, 8)


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "8..2", "1..", "1..9999999", "1.5"])
def test_what_is_no_number_of_replicas(text: str):
    with pytest.raises(ConfigError, match="replicas="):
        Replicas.parse(text)


def test_the_command_line_names_its_option(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--replicas", "8..2"]) == 2
    assert "--replicas='8..2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "gpus", "wanted"),
    [
        ({"device": "cpu", "tensor_parallel": 2}, 0, {"num_cpus": 2}),
        ({"tensor_parallel": 2, "num_threads": 3}, 0, {"num_cpus": 6}),
        ({}, 0, {"num_cpus": 1}),
        ({"tensor_parallel": 2, "num_threads": 3}, 4, {"num_gpus": 2, "num_cpus": 1}),
        ({"device": "cpu", "num_threads": 3}, 4, {"num_cpus": 3}),
    ],
)
def test_a_group_has_a_core_or_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], gpus: int, wanted: dict[str, float]
):
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"GPU": gpus, "CPU": 16})
    assert resources_of(options) == wanted


def test_rows_of_a_batch():
    assert prompt_of({"id": "a", "prompt": [1, 2]}) == [1, 2]
    messages = [{"role": "user", "content": "Hi", "name": None}]
    assert prompt_of({"id": "a", "messages": messages, "prompt": None}) == [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="id='a'") as caught:
        prompt_of({"id": "a", "prompt": None})
    answer = refused(caught.value)
    assert answer["finish_reason"] == "error" and answer["generated_text"] is None


def test_bodies_that_came_together_are_one_message():
    assert _joined([HEAD, part(b"a", True), part(b"b", True), part(b"")]) == [HEAD, part(b"ab")]
    assert _joined([HEAD]) == [HEAD]
    assert _joined([part(b"a", True)]) == [part(b"a", True)]


def test_an_exchange_hands_on_everything_and_ends_a_pause_with_the_answer():
    async def run() -> None:
        exchange = _Exchange(b"body")
        assert (await exchange.receive())["body"] == b"body"
        await exchange.send(HEAD)
        batches = exchange.batches()
        assert await anext(batches) == [HEAD]
        await exchange.send(part(b"a", True))
        await exchange.send(part(b"b"))
        exchange.finish()
        await asyncio.wait_for(exchange.pause(60), 1)
        assert [batch async for batch in batches] == [[part(b"a", True), part(b"b")]]
        exchange.disconnect()
        assert (await exchange.receive())["type"] == "http.disconnect"
        exchange.note_token()
        assert await anext(exchange.batches()) == [{"type": FIRST_TOKEN}]

    asyncio.run(run())
