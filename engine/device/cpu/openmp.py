"""OpenMP's waiting threads: they spin on an idle machine, and sleep where other work needs the cores.

At the end of each parallel region, a hundred times a step, waiting threads spin for up to 300,000 rounds. Spinning is
fastest on an idle machine; beside another program all threads spin until the one that lost its core gets it back.
libgomp stops spinning after 100 rounds when threads outnumber cores; a parked extra team forces that while the machine
is busy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

CHECK_SECONDS = 0.2  # between two looks at the machine; steps take many times as long until other work is noticed
CROWDED_SHARE = 0.1  # of the time, spent waiting for a core: .02 on an idle machine, .4 and more beside a busy process

_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_PARALLEL_SIZE = 2**20  # elements that torch adds up with all of its threads


@contextmanager
def considerate_threads() -> Iterator[None]:
    """Lets OpenMP's threads spin or sleep as the machine has room, unless libgomp's variables say how they wait."""
    if any(name in os.environ for name in _SETTINGS):
        yield
        return
    done = threading.Event()
    watch = in_a_thread(lambda: _watch(done))
    try:
        yield
    finally:
        done.set()
        watch.join()


def run_delay() -> float | None:
    """Seconds for which the threads of this process have waited for a core; ``None`` where the system does not tell.

    Linux alone does, in ``/proc/self/task/*/schedstat``. The seconds of a thread that ends are taken away again.
    """
    ran = waited = 0
    with suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{task}/schedstat") as file:
                nanoseconds = file.read().split()
                ran, waited = ran + int(nanoseconds[0]), waited + int(nanoseconds[1])
    return waited / 1e9 if ran else None


def use_threads(number: int) -> None:
    """Lets the calling thread compute with ``number`` threads. Other threads of the process keep torch's number."""
    if number == torch.get_num_threads():
        return
    common: list[int] = []
    in_a_thread(lambda: common.append(torch.get_num_threads())).join()  # this thread may have a number of its own
    torch.set_num_threads(number)
    torch.get_num_threads()  # torch takes the number over for this thread, and reads the global one no more
    in_a_thread(lambda: torch.set_num_threads(common[0])).join()


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    """A daemon thread that does ``work``."""
    thread = threading.Thread(target=work, name="qkv-engine-threads", daemon=True)
    thread.start()
    return thread


def _watch(done: threading.Event) -> None:
    team: _Team | None = None
    before, began = run_delay(), time.monotonic()
    while not done.wait(CHECK_SECONDS):
        waited, now = run_delay(), time.monotonic()
        is_crowded = waited is None or before is None or waited - before > CROWDED_SHARE * (now - began)
        before, began = waited, now
        if is_crowded and team is None:
            team = _Team()
        elif team is not None and not is_crowded:
            team.end()
            team = None
    if team is not None:
        team.end()


class _Team:
    """An idle team of as many OpenMP threads as cores."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = in_a_thread(self._stand_by)

    def _stand_by(self) -> None:
        use_threads(max(torch.get_num_threads(), os.cpu_count() or 1))
        torch.ones(_PARALLEL_SIZE).add_(1)
        self._ended.wait()

    def end(self) -> None:
        """Ends the team and waits until its thread has left torch."""
        self._ended.set()
        self._thread.join()
