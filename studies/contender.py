"""A process for each engine to measure: it loads the engine, waits for its turn, and times one run at a time.

Two engines in one process would slow each other down even when only one runs: OpenMP lets threads wait for work
awake only while the workers of the whole process do not outnumber the cores.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from qkv_engine.bench.timing import Timeline, decode_rate
from qkv_engine.errors import QKVError


class Generation(NamedTuple):
    """The result of one run: the output tokens of each prompt, and when they came."""

    tokens: list[list[int]]
    timelines: list[Timeline]


Generate = Callable[[list[list[int]], int], Generation]  # prompts of equal length, output tokens of each


class Loaded(NamedTuple):
    """An engine ready to run: its ways to run by name, and the token ids that prompts may hold."""

    ways: dict[str, Generate]
    vocabulary: list[int]


class Run(NamedTuple):
    """One timed run: tokens per second while the whole batch decodes, and over everything."""

    decode: float
    output: float
    tokens: list[list[int]]


def measure(generate: Generate, prompts: list[list[int]], output_len: int) -> Run:
    """Times one run and checks that it is complete."""
    start = time.monotonic()
    tokens, timelines = generate(prompts, output_len)
    seconds = time.monotonic() - start
    if any(len(row) != output_len for row in tokens):
        raise QKVError(f"a run gave other than {output_len} tokens")
    decode = decode_rate(timelines)
    if decode is None:
        raise QKVError("the requests of a batch never all decoded at once", remedy="Raise the output length")
    return Run(decode, len(prompts) * output_len / seconds, tokens)


class Contender:
    """Calls ``load`` in a new process and keeps it until closed. Raises ``QKVError`` for any failure there."""

    def __init__(self, load: Callable[[], Loaded]):
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(load, far_end), daemon=True)
        self._process.start()
        far_end.close()
        self.ways, self.vocabulary = self._answer()

    def measure(self, way: str, prompts: list[list[int]], output_len: int) -> Run:
        """One timed run in the other process."""
        self._pipe.send((way, prompts, output_len))
        run: Run = self._answer()
        return run

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise QKVError(f"the process of an engine ended with code {self._process.exitcode}") from None
        if isinstance(answer, QKVError):
            raise answer
        return answer


def _serve(load: Callable[[], Loaded], pipe: Connection) -> None:
    """The loop of the other process: answers each message with its result or a ``QKVError``, until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process in front
    try:
        loaded = load()
        pipe.send((list(loaded.ways), loaded.vocabulary))
        while True:
            way, prompts, output_len = pipe.recv()
            pipe.send(measure(loaded.ways[way], prompts, output_len))
    except EOFError:  # the process in front is gone
        return
    except QKVError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(QKVError(f"{type(error).__name__}: {error}"))
