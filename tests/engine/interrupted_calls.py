"""A program that interrupts its own calls of an engine: ``python interrupted_calls.py NUMBER SEED``.

A timer raises ``KeyboardInterrupt`` at a random moment of each call, as Ctrl-C does. Other threads read streams all the
time. At the end, and every 500 interrupts, the engine must still answer, hold nothing, and have left no thread.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import qkv_engine
from qkv_engine import Engine, RequestError, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from tests.small_demo import small_demo

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
HOME = Path(qkv_engine.__file__).parent
PATIENCE = 60.0  # seconds for an answer before it counts as a deadlock


def read_stream(engine: Engine) -> None:
    for output in engine.stream([5, 6, 7], SHORT):
        assert output.token_ids


def drop_stream(engine: Engine) -> None:
    next(engine.stream([5, 6, 7], LONG))


def read_async(engine: Engine) -> None:
    async def read() -> None:
        async for _ in engine.generate_async([5, 6], SHORT):
            pass

    asyncio.run(read())


def name_streams(engine: Engine) -> None:
    with suppress(RequestError):  # an interrupted one may still be live
        engine.stream([5, 6, 7], LONG, request_id="mine").close()
    engine.abort("mine")


CALLS: dict[str, tuple[Callable[[Engine], object], float]] = {  # with the longest delay of the interrupt in seconds
    "generate": (lambda engine: engine.generate([[5, 6]] * 3, SHORT), 0.02),
    "chat": (lambda engine: engine.chat("hi", SHORT), 0.02),
    "stream": (read_stream, 0.02),
    "drop": (drop_stream, 0.01),
    "async": (read_async, 0.02),
    "submit": (lambda engine: engine.stream([5, 6, 7], LONG).close(), 0.001),
    "name": (name_streams, 0.001),
    "stats": (lambda engine: [engine.stats() for _ in range(20)], 0.003),
    "reset_stats": (lambda engine: engine.reset_stats(), 0.001),
    "params": (lambda engine: [engine.params(top_k=5) for _ in range(20)], 0.001),
    "describe": (lambda engine: [engine.describe() for _ in range(100)], 0.0005),
}


class Background(threading.Thread):
    """A thread that is never interrupted and whose answers must never change."""

    def __init__(self, engine: Engine):
        super().__init__(daemon=True)
        self.engine, self.num_answers, self.wrong, self.stopping = engine, 0, 0, threading.Event()

    def run(self) -> None:
        expected = None
        while not self.stopping.is_set():
            found = self.engine.generate([[9, 8, 7]], SHORT)[0].token_ids
            expected = expected or found
            self.wrong += found != expected
            self.num_answers += 1


def interrupted(call: Callable[[], object], delay: float) -> bool:
    """Runs ``call`` with an interrupt after ``delay`` seconds; whether it came before the end."""
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, asyncio.CancelledError):  # the latter between two lines of ``asyncio.Runner.run``
        return True
    return False


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether ``call`` returns in time, in a thread of its own."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def check(engine: Engine, background: Background) -> None:
    before = background.num_answers
    assert within(PATIENCE, lambda: engine.generate([[5]], SHORT)), "deadlock: generate"
    assert within(PATIENCE, engine.stats), "deadlock: stats"
    deadline = time.monotonic() + PATIENCE
    while background.num_answers == before:
        assert time.monotonic() < deadline, "deadlock: another thread"
        time.sleep(0.01)


def attack(number: int, seed: int) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    engine = Engine(small_demo(), kv="fp32", kv_memory="8MiB")
    background = Background(engine)
    background.start()
    names = list(CALLS)
    while sum(counts.values()) < number:
        name = rng.choice(names)
        call, longest = CALLS[name]
        try:
            counts[name] += interrupted(lambda call=call: call(engine), rng.uniform(1e-5, longest))
        except KeyboardInterrupt:  # just behind the call
            counts[name] += 1
        if sum(counts.values()) % 500 == 499:
            check(engine, background)
            counts["checks"] += 1
    check(engine, background)
    background.stopping.set()
    background.join(PATIENCE)
    assert not background.is_alive() and not background.wrong, "another thread's answers changed"
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while engine._loop.call(lambda: len(engine._started.core.live)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine._loop.call(lambda: len(engine._started.core.live)) == 0, "entries are stuck"
    assert engine.stats().kv_bytes_used == 0, "memory is stuck"
    engine.close()
    return counts


def attack_start(number: int, seed: int) -> int:
    """Interrupts ``Engine(...)`` and ``close``; every thread must end."""
    rng, count = random.Random(seed), 0

    def come_and_go() -> None:
        Engine(small_demo(), kv_memory="8MiB").close()

    started = time.monotonic()
    come_and_go()
    longest = 1.2 * (time.monotonic() - started)
    for _ in range(2 * number):
        try:
            count += interrupted(come_and_go, rng.uniform(1e-5, longest))
        except KeyboardInterrupt:
            count += 1
        if count >= number:
            break
    gc.collect()
    return count


def press_ctrl_c(signum: int, frame: FrameType | None) -> None:
    """Whatever SIGINT does now: an event loop cancels its task, as an exception inside asyncio would break the loop."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, frame)


def main() -> None:
    number, seed = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGALRM, press_ctrl_c)
    unraisable: list[str] = []
    sys.unraisablehook = lambda args: unraisable.append("".join(traceback.format_exception(args.exc_value)))
    num_threads = threading.active_count()
    counts = attack(number, seed)
    counts["Engine"] = attack_start(max(10, number // 40), seed)
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > num_threads and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert threading.active_count() == num_threads, f"threads are left: {threading.enumerate()}"
    ours = [text for text in unraisable if f'File "{HOME}' in text]  # asyncio has some of its own
    others = [text for text in ours if "KeyboardInterrupt" not in text.splitlines()[-1]]
    assert not others, others[0]
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
