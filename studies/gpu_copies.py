"""Decode steps beside copies to and from host memory: what part ``host-steps`` of ``studies/gpu_check.py`` times."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from qkv_engine import SamplingParams
from qkv_engine.config import EngineConfig
from qkv_engine.presets import resolve_kv
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission
from qkv_engine.startup import start

from .gpu_host import options
from .gpu_steps import Machine, random_ids

NUM_POOL, POOL_TOKENS, ROUNDS = 6, 8192, 8  # prompts that come back in turn; some 200 steps beside copies
TINY_ROUNDS = 2
OTHERS = 16  # requests that decode: a sixteenth of such a prompt, and an eighth behind it
VOCAB_SIZE = 1000  # of the ids drawn; every model has as many
APART, ALONE = 2, 4  # steps behind a prompt that count for nothing, and steps alone then, at the same contexts


class Copied(NamedTuple):
    """Bytes of copies that one command has."""

    out: int = 0
    written: int = 0
    fetched: int = 0


class StepNote(NamedTuple):
    """A decode step without chunks of prompts, in seconds from the end of the one before.

    ``beside``: copies of its own command; ``next``: those of the one that was made up meanwhile, which took the host
    ``books`` seconds and ``launch`` more. ``collected``: seconds of Python's garbage collection, by generation.
    """

    seconds: float
    beside: Copied
    next: Copied
    books: float
    launch: float
    collected: tuple[float, float, float]

    @property
    def is_busy(self) -> bool:
        """Whether the device copies beside it, or the host prepares copies."""
        return any(self.beside) or any(self.next)

    def __str__(self) -> str:
        ms = [f"{1e3 * each:.2f}" for each in (self.seconds, self.books, self.launch, *self.collected)]
        beside, following = ("/".join(f"{n / 1e6:.0f}" for n in copied) for copied in (self.beside, self.next))
        return (
            f"{ms[0]} ms, beside {beside} MB out/written/fetched, books of the next {ms[1]} ms for {following} MB, "
            f"its launch {ms[2]} ms, collections {ms[3]}/{ms[4]}/{ms[5]} ms"
        )


class Watch:
    """Notes each step of ``core``. ``collections``: those of Python are timed inside."""

    def __init__(self, core: EngineCore):
        prefix = core.space.prefix
        assert prefix is not None and prefix.host is not None
        self.core, self._tier = core, prefix.host.tier
        self._last, self._collected = Copied(), [0.0, 0.0, 0.0]
        self._booked = self._launched = self._collecting = 0.0
        moves, launch = core.runner.launch_moves, core.runner.launch

        def launch_moves() -> Any:
            self._booked = time.perf_counter()
            return moves()

        def launch_step(*args: Any, **kwargs: Any) -> Any:
            try:
                return launch(*args, **kwargs)
            finally:
                self._launched = time.perf_counter()

        core.runner.launch_moves, core.runner.launch = launch_moves, launch_step  # type: ignore[method-assign]

    @contextmanager
    def collections(self) -> Iterator[None]:
        """Listens to the garbage collector."""

        def heard(phase: str, info: dict[str, int]) -> None:
            now = time.perf_counter()
            if phase == "stop":
                self._collected[info["generation"]] += now - self._collecting
            self._collecting = now

        gc.callbacks.append(heard)
        try:
            yield
        finally:
            gc.callbacks.remove(heard)

    def steps(self, number: int = sys.maxsize) -> Iterator[StepNote]:
        """The next steps while there is work."""
        while number and self.core.has_work:
            number -= 1
            before, self._collected[:] = self._tier.stats(), [0.0, 0.0, 0.0]
            began = self._booked = self._launched = time.perf_counter()
            self.core.step()
            now = self._tier.stats()
            copied = Copied(
                now.out_nbytes - before.out_nbytes,
                now.written_nbytes - before.written_nbytes,
                now.fetched_nbytes - before.fetched_nbytes,
            )
            last, self._last = self._last, copied
            if self.core.last_step is not None and self.core.last_step[0] is not None:
                zero, one, two = self._collected
                books, launch = self._booked - began, max(0.0, self._launched - self._booked)
                yield StepNote(self.core.last_step[1], last, copied, books, launch, (zero, one, two))


def steps_beside_copies(machine: Machine) -> tuple[list[StepNote], list[StepNote]]:
    """Steps of requests that decode while prompts come back in turn from host memory, and others leave for them.

    Those alone, a few behind each prompt, and those beside copies.
    """
    length = machine.tokens(POOL_TOKENS)
    core = start(EngineConfig(**options(machine, length, kv=resolve_kv("bf16")))).core
    watch, notes = Watch(core), list[StepNote]()
    try:
        pool = [random_ids(VOCAB_SIZE, length, seed) for seed in range(NUM_POOL)]
        for index, ids in enumerate(pool):
            add_prompt(core, f"first {index}", ids, 1)
            list(watch.steps())
        for index in range(machine.requests(OTHERS)):
            add_prompt(core, f"other {index}", random_ids(VOCAB_SIZE, length // 16, 100 + index), length // 8)
        while not all(request.num_output_tokens for request in core.scheduler.requests.values()):
            core.step()
        list(watch.steps(length // 80))  # graphs are captured
        with watch.collections():
            for index in range((TINY_ROUNDS if machine.is_tiny else ROUNDS) * NUM_POOL):
                name = add_prompt(core, f"again {index}", pool[index % NUM_POOL], 1)
                while name in core.live:
                    notes.extend(note for note in watch.steps(1) if note.is_busy)
                list(watch.steps(APART))
                notes.extend(watch.steps(ALONE))
        return [note for note in notes if not note.is_busy], [note for note in notes if note.is_busy]
    finally:
        core.free()


def add_prompt(core: EngineCore, name: str, ids: list[int], max_tokens: int) -> str:
    """Adds a greedy request that ends at ``max_tokens``, and returns its name."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    core.add(Submission(name, None, ids, params, max_tokens, 0, [], False, floor=0))
    return name
