"""Sandboxes in turns: one request a tenant at a time, the tenants one after the other, each with its own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qkv_engine.sandbox import Job, Sandboxes

WORKER = """
import time

class Worker:
    def __init__(self, setup):
        pass

    def answer(self, request):
        time.sleep(float(request))
        return request
"""
PATIENCE = 20.0  # seconds before a wait counts as endless


@pytest.fixture
def sandboxes(tmp_path: Path) -> Iterator[Sandboxes]:
    source = tmp_path / "worker.py"
    source.write_text(WORKER)
    job = Job("sleeps", source, folders=[], seconds=0.1, start_seconds=PATIENCE, memory=1 << 26)
    made = Sandboxes(job, lambda: b"")
    yield made
    made.close()
    assert not made._waiting and not made._running


class Turns:
    """Turns in threads of their own, which end when they are told to, and the order in which they began."""

    def __init__(self, sandboxes: Sandboxes):
        self.begun, self._sandboxes = list[str](), sandboxes
        self._ends: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    def add(self, *names: str) -> None:
        """Asks for turns; the tenant is the first letter of a name."""
        for name in names:
            self._ends[name] = threading.Event()
            self._threads[name] = threading.Thread(target=self._take, args=(name,), daemon=True)
            self._threads[name].start()
            wait_until(lambda: sum(map(len, self._sandboxes._waiting.values())) + len(self.begun) == len(self._ends))

    def end(self, name: str, *, then: str | None = None) -> None:
        """Ends a turn, after which ``then`` begins."""
        self._ends[name].set()
        self._threads[name].join(PATIENCE)
        if then is not None:
            wait_until(lambda: self.begun[-1] == then)

    def _take(self, name: str) -> None:
        with self._sandboxes.turn(name[0]):
            self.begun.append(name)
            self._ends[name].wait(PATIENCE)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_tenant_leaves_a_sandbox_free(sandboxes: Sandboxes) -> None:
    turns = Turns(sandboxes)
    turns.add("a1", "a2", "a3", "b1")
    wait_until(lambda: turns.begun == ["a1", "b1"])  # a turn that is about to begin counts as waiting
    turns.end("b1")
    turns.end("a1", then="a2")
    turns.end("a2", then="a3")
    turns.end("a3")


def test_who_waited_longest_is_next_however_many_wait_beside(sandboxes: Sandboxes) -> None:
    turns = Turns(sandboxes)
    turns.add("a1", "c1", "a2", "a3", "c2", "b1", "d1")
    turns.end("a1", then="b1")
    turns.end("c1", then="d1")
    turns.end("b1", then="a2")
    turns.end("d1", then="c2")
    turns.end("c2")
    turns.end("a2", then="a3")
    turns.end("a3")


def test_who_ends_a_process_waits_for_the_next_one(sandboxes: Sandboxes) -> None:
    with sandboxes.turn("a") as first, sandboxes.turn("b") as second:
        assert first is not second and (first.ask(b"0"), second.ask(b"0")) == (b"0", b"0")
    for _ in range(2):
        with sandboxes.turn("a") as own:
            assert own is first
            with pytest.raises(TimeoutError):
                own.ask(b"60")
        assert not first.is_warm and second.is_warm
        with sandboxes.turn("c") as other:
            assert other is second and other.ask(b"0") == b"0"


def test_a_wait_that_is_interrupted_leaves_nothing(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    turns = Turns(sandboxes)
    turns.add("a1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sandboxes._changed, "wait", interrupt)
        with sandboxes.turn("a"):
            raise AssertionError
    turns.add("b1")
    turns.end("a1")
    turns.end("b1")


def test_a_turn_within_a_turn_of_its_thread_is_the_same_one(sandboxes: Sandboxes) -> None:
    """A finalizer may ask in the middle of an exchange of its thread."""
    with sandboxes.turn("a") as outer, sandboxes.turn("a") as inner:
        assert inner is outer
