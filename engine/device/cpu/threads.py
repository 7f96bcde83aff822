"""CPU threads of the engine's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

from ...own_thread import in_own_thread
from .openmp import considerate_threads, use_threads
from .thread_choice import ThreadChoice

SMALL_MODEL_NBYTES = 64 * 2**20  # of weights; up to here a step is too short for more than SMALL_MODEL_THREADS
SMALL_MODEL_THREADS = 4
_STEP_SIZE = 512  # rows and columns of a small model's matrices


def choose_threads(given: int | None, weights_nbytes: int, *, is_fixed: bool = False) -> ThreadChoice:
    """The number of threads: ``given``, or torch's own; for a small model a few, or one where one is faster.

    The last choice is for now: the engine's own steps may change it. Under ``is_fixed`` no time is looked at: a small
    model has one thread, in every run.
    """
    if given is not None:
        return ThreadChoice(given)
    most = torch.get_num_threads()
    if weights_nbytes > SMALL_MODEL_NBYTES:
        return ThreadChoice(most, reason="PyTorch's number")
    few = min(most, SMALL_MODEL_THREADS)
    if is_fixed:
        return ThreadChoice(1, reason="a small model's, whatever is faster")
    if few == 1:
        return ThreadChoice(1, reason="PyTorch's number")
    number, other = (few, 1) if short_step_seconds(few) < short_step_seconds(1) else (1, few)
    return ThreadChoice(number, other, "a short step is faster so")


@cache
def short_step_seconds(number: int) -> float:
    """Seconds of a stand-in for a small model's step with ``number`` threads; measured once, in some 40 milliseconds.

    Waking a thread takes a few microseconds on some machines and as long as an operator computes on others.
    """

    def measure(stopped: Callable[[], bool]) -> float:
        found: list[float] = []
        with computing_with(number):
            x, weights = torch.ones(1, _STEP_SIZE), torch.ones(4, _STEP_SIZE, _STEP_SIZE)
            while len(found) < 8 and not stopped():
                start = time.perf_counter()
                for weight in 10 * weights.unbind():
                    x = torch.nn.functional.linear(x, weight).clamp_(max=1)
                    for _ in range(15):  # operators too short to be shared out
                        x = x + 1
                found.append(time.perf_counter() - start)
        return min(found, default=0.0)

    return in_own_thread(measure)


@contextmanager
def computing_with(number: int | None) -> Iterator[None]:
    """Lets the calling thread compute with ``number`` threads. Other threads of the process keep torch's number."""
    if number is None:
        yield
        return
    use_threads(number)
    with considerate_threads() if number > 1 else nullcontext():
        yield
