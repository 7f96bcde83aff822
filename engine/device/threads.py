"""CPU threads of the engine's own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .openmp import is_decided

SMALL_MODEL_NBYTES = 64 * 2**20  # of weights, below which a step is too short for more than SMALL_MODEL_THREADS
SMALL_MODEL_THREADS = 4
FEW_CORES = 2  # on which a small model uses one thread: waking the other one costs what it computes
_PARALLEL_SIZE = 2**20  # elements that torch adds up with all of its threads


def choose_num_threads(given: int | None, weights_nbytes: int) -> int:
    """``given``, or torch's own number, of which a small model uses a few, and of two one."""
    if given is not None:
        return given
    most = torch.get_num_threads()
    if weights_nbytes > SMALL_MODEL_NBYTES:
        return most
    return 1 if most <= FEW_CORES else min(most, SMALL_MODEL_THREADS)


@contextmanager
def computing_with(number: int | None) -> Iterator[None]:
    """Lets the calling thread compute with ``number`` threads. Other threads of the process keep torch's number.

    Where torch was loaded before this package, its threads would spin for long. Libgomp cuts that short while there are
    more OpenMP threads than cores, so for the time being an idle team of them stands by.
    """
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
        torch.get_num_threads()  # torch takes the number over for this thread, and reads the global one no more
        _in_a_thread(lambda: torch.set_num_threads(before)).join()
    if number == 1 or is_decided():
        yield
        return
    done = threading.Event()
    _in_a_thread(lambda: _stand_by(done))
    try:
        yield
    finally:
        done.set()


def _stand_by(done: threading.Event) -> None:
    torch.ones(_PARALLEL_SIZE).add_(1)
    done.wait()


def _in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="qkv-engine-threads", daemon=True)
    thread.start()
    return thread
