"""CPU threads of the engine's own thread."""

from __future__ import annotations

import threading

import torch

SMALL_MODEL_NBYTES = 64 * 2**20  # weights that one core reads in a few milliseconds: more threads only wait


def choose_num_threads(given: int | None, weights_nbytes: int) -> int:
    """``given``, or torch's own number; one for a small model, which is as fast and never waits for other programs."""
    if given is not None:
        return given
    return 1 if weights_nbytes <= SMALL_MODEL_NBYTES else torch.get_num_threads()


def set_num_threads(number: int) -> None:
    """Lets the calling thread compute with ``number`` threads. Other threads of the process keep torch's number."""
    before = torch.get_num_threads()
    if number == before:
        return
    torch.set_num_threads(number)
    torch.get_num_threads()  # here torch takes the number over for this thread; from now on the global one is not read
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,), name="qkv-engine-threads")
    restoring.start()
    restoring.join()
