"""Work before the scheduler: turns are fair between tenants, large bodies are few, seats are shared."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from qkv_engine import Engine
from qkv_engine.serve import bodies, fair_threads
from qkv_engine.serve.errors import ApiError
from qkv_engine.serve.fair_threads import LARGE, MAX_BYTES, TENANT_THREADS, THREADS, FairThreads, Load
from qkv_engine.serve.frontend import MAX_CONTEXTS
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.limits import Limits
from qkv_engine.serve.seats import Seats

from .running import ENDLESS_BODY, Running, running


class Works:
    """Pieces of work that end when they are told to, and the order in which they began."""

    def __init__(self) -> None:
        self.threads, self.begun = FairThreads(), list[str]()
        self._ends: dict[str, threading.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, nbytes: int = 0) -> None:
        """Asks for a thread; the tenant is the first letter of ``name``."""
        self._ends[name] = threading.Event()

        def work() -> None:
            self.begun.append(name)
            self._ends[name].wait(10)

        self._tasks[name] = asyncio.ensure_future(self.threads.run(Load(name[0], nbytes), work))
        await self._settle()

    async def end(self, *names: str) -> None:
        """Lets pieces of work end one after the other."""
        for name in names:
            self._ends[name].set()
            await self._tasks.pop(name)
            await self._settle()

    async def leave(self, name: str) -> None:
        """The client of a piece of work that waits leaves."""
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks.pop(name), return_exceptions=True)
        await self._settle()

    async def end_all(self) -> None:
        while self._tasks:
            await self.end(*(name for name in self.begun if name in self._tasks))
        assert not self.threads._waiting and not self.threads._running and not self.threads._nbytes

    async def _settle(self) -> None:
        """Waits until whatever has a turn has begun."""
        await asyncio.sleep(0)
        while sum(name in self._tasks for name in self.begun) < self.threads._running.total():
            await asyncio.sleep(0.001)


def play(script: Callable[[Works], object]) -> list[str]:
    """The order in which a script's pieces of work began."""
    works = Works()

    async def run() -> None:
        await script(works)
        await works.end_all()

    asyncio.run(asyncio.wait_for(run(), 30))
    return works.begun


def test_one_tenant_leaves_threads_to_the_others():
    async def script(works: Works) -> None:
        for number in range(THREADS + 4):
            await works.add(f"a{number}")
        assert len(works.begun) == TENANT_THREADS < THREADS
        await works.add("b0")
        assert works.begun[-1] == "b0"

    play(script)


def test_who_waits_has_turns_one_after_the_other():
    async def script(works: Works) -> None:
        for tenant in "ab":
            for number in range(8):
                await works.add(f"{tenant}{number}")
        for name in ("c0", "c1", "d0", "c2", "d1"):
            await works.add(name)
        assert len(works.begun) == THREADS
        await works.end("a0", "a1", "b0", "b1", "a2", "a3")

    assert play(script)[THREADS : THREADS + 6] == ["c0", "d0", "c1", "d1", "a4", "a5"]  # to whoever has the fewest


def test_equal_tenants_take_turns():
    async def script(works: Works) -> None:
        for tenant in "xy":
            for number in range(TENANT_THREADS):
                await works.add(f"{tenant}{number}")
        for name in ("a0", "a1", "a2", "b0", "b1", "b2"):
            await works.add(name)
        for number in range(TENANT_THREADS - 1):
            await works.end(f"x{number}", f"y{number}")

    assert play(script)[THREADS : THREADS + 6] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_large_bodies_have_so_many_bytes_at_once_and_small_ones_pass_them():
    half = MAX_BYTES // 2

    async def script(works: Works) -> None:
        await works.add("a0", half)
        await works.add("a1", half)
        await works.add("a2", LARGE + 1)
        await works.add("b0", 2 * MAX_BYTES)
        await works.add("b1", LARGE)
        await works.add("c0", LARGE)
        assert works.begun == ["a0", "a1", "c0"]  # a tenant's own work stays in order
        await works.end("a0")
        assert (
            works.begun[3:] == []
        )  # b, without a thread, is next: no smaller body goes first, or b might wait for ever
        await works.end("a1")

    begun = play(script)[3:]
    assert begun[0] == "a2" and set(begun[1:]) == {"b0", "b1"}


def test_who_leaves_gives_the_turn_to_the_next():
    async def script(works: Works) -> None:
        for number in range(TENANT_THREADS + 2):
            await works.add(f"a{number}")
        await works.leave(f"a{TENANT_THREADS}")
        await works.end("a0")
        assert works.begun[-1] == f"a{TENANT_THREADS + 1}"

    play(script)


def test_a_failure_gives_the_thread_back():
    threads = FairThreads()

    async def run() -> None:
        for _ in range(THREADS + 1):
            with pytest.raises(ZeroDivisionError):
                await threads.run(Load("a", MAX_BYTES), lambda: 1 // 0)

    asyncio.run(run())
    assert not threads._running and not threads._nbytes


def test_one_body_is_decoded_at_a_time_and_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch):
    now, spans = 100.0, list[tuple[float, float]]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def decode(seconds: float) -> None:
        begin = now
        sleep(seconds)
        time.sleep(0.002)  # in which another one would begin
        spans.append((begin, now))
        if seconds == 4:
            raise ZeroDivisionError

    async def run() -> list[object]:
        threads = FairThreads()
        work = (
            threads.run(Load(tenant, 9), partial(threads.alone, partial(decode, i)))
            for i, tenant in enumerate("abab", 1)
        )
        return await asyncio.gather(*work, return_exceptions=True)

    monkeypatch.setattr(fair_threads, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    found = asyncio.run(run())
    assert found[:3] == [None] * 3 and isinstance(found[3], ZeroDivisionError)
    took = [end - begin for begin, end in spans]
    assert sorted(took) == [1, 2, 3, 4]
    assert [begin - end for (_, end), (begin, _) in pairwise(spans)] == took[:-1]


def status_of(seats: Seats, tenant: str, number: int = 1) -> int:
    try:
        seats.take(tenant, number)
    except ApiError as error:
        return error.status
    return 200


def test_a_tenant_holds_no_more_seats_than_it_leaves_free():
    seats = Seats(12, is_shared=True)
    assert [status_of(seats, "alice") for _ in range(7)] == [200] * 6 + [429]
    assert [status_of(seats, "bob") for _ in range(4)] == [200] * 3 + [429]
    assert [status_of(seats, "carol"), status_of(seats, "carol"), status_of(seats, "dave")] == [200, 429, 200]
    seats.give_back("alice", 6)
    assert [status_of(seats, "bob", number) for number in (3, 2, 1)] == [429, 200, 429]
    assert status_of(seats, "erin", 7) == 400 and status_of(Seats(12, is_shared=True), "erin", 6) == 200


def test_all_seats_are_one_tenant_s_where_there_are_no_others():
    seats = Seats(3, is_shared=False)
    assert [status_of(seats, "", number) for number in (4, 2, 2, 1, 1)] == [400, 200, 429, 200, 429]
    one = Seats(1, is_shared=True)
    assert [status_of(one, "a"), status_of(one, "b")] == [200, 429]


ALICE, BOB = {"authorization": "Bearer alice-secret-1"}, {"authorization": "Bearer bob-secret-22"}


@pytest.fixture(scope="module")
def shared(demo_engine: Engine) -> Iterator[Running]:
    keys = Keys([("alice", "alice-secret-1"), ("bob", "bob-secret-22")])
    with running(demo_engine, keys=keys, limits=Limits(max_requests=6)) as found:
        yield found


def test_one_tenant_s_completions_leave_seats_to_the_others(shared: Running):
    body = {**ENDLESS_BODY, "n": 3, "temperature": 1, "stream": True}
    with shared.http.stream("POST", "/v1/completions", json=body, headers=ALICE) as busy:
        lines = busy.iter_lines()
        next(lines)
        asked = {"prompt": "Hi", "max_tokens": 1}
        refused = shared.http.post("/v1/completions", json=asked, headers=ALICE)
        assert refused.status_code == 429 and "3 of them yours" in refused.json()["error"]["message"]
        assert shared.http.post("/tokenize", json={"prompt": "Hi"}, headers=ALICE).status_code == 429
        assert shared.http.post("/detokenize", json={"tokens": [5]}, headers=ALICE).status_code == 429
        assert shared.http.post("/v1/completions", json=asked, headers=BOB).status_code == 200
        assert shared.http.post("/tokenize", json={"prompt": "Hi"}, headers=BOB).status_code == 200
    shared.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "seats"),
    [
        ("/tokenize", {"prompt": "Hi"}, 2),
        ("/detokenize", {"tokens": [5]}, 2),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, 1),
    ],
)
def test_work_that_is_no_request_takes_a_seat_each_time(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: object, seats: int
):
    """One while the body is read, another one while it is tokenized."""
    held, take = list[str](), server.frontend.seats.held
    monkeypatch.setattr(server.frontend.seats, "held", lambda tenant: held.append(tenant) or take(tenant))
    assert server.post(body, path).status_code == 200 and len(held) == seats


def test_texts_and_ids_far_beyond_the_context_are_refused(server: Running):
    most = MAX_CONTEXTS * server.engine.max_model_len
    ids = [5] * most
    assert len(server.post({"tokens": ids}, "/detokenize").json()["prompt"]) >= most
    refused = server.post({"tokens": [*ids, 5]}, "/detokenize")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
    assert server.post({"prompt": "a " * 8192}, "/tokenize").json()["count"] > server.engine.max_model_len
    for body in ({"prompt": "a " * 4_000_000}, {"messages": [{"role": "user", "content": "a " * 3_000_000}]}):
        assert server.post(body, "/tokenize").status_code == 400
    assert server.post({"tokens": [-1]}, "/detokenize").status_code == 400
    assert server.post({"tokens": [server.engine.vocab_size]}, "/detokenize").status_code == 400


def test_more_ids_than_the_context_holds_are_refused_at_once(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server.frontend.threads, "run", None)
    body = {"prompt": [5] * (server.engine.max_model_len + 1)}
    refused = server.post(body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("other", "is_at_once"), [("x" * 100, True), ("[" * 9000, True), ("x" * (LARGE + 1), False), ([[]] * 300, False)]
)
def test_what_takes_long_to_decode_is_decoded_in_a_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch, other: object, is_at_once: bool
):
    names, decode = list[str](), bodies.decode
    monkeypatch.setattr(
        bodies, "decode", lambda *given: names.append(threading.current_thread().name) or decode(*given)
    )
    assert server.post({"prompt": [5, 6], "max_tokens": 1, "other": other}).status_code == 200
    assert len(names) == 1 and ("AnyIO" in names[0]) != is_at_once
