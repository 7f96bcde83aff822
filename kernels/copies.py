"""Copies to the device that the host does not wait for."""

from __future__ import annotations

import ctypes
from array import array
from itertools import cycle

import torch
from torch import Tensor

NUM_PINNED = 4  # buffers of a ring: more than steps are ever under way


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``; a tensor that is there already, itself.

    Torch's allocator gives the pinned memory in between to nobody else before the copy has been made.
    """
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)


class PinnedWords:
    """Pinned memory for [n] int64, for copies that are made again and again. What each needs is made once.

    All of it is copied each time: some thousand words more take the device less than views of a part take the host.
    ``words`` are its elements, read and written without torch, which takes longer for few.
    """

    def __init__(self, partner: Tensor):
        """For copies from or to ``partner`` [n] int64, on whichever device."""
        self._partner = partner
        self._memory = torch.zeros(partner.shape, dtype=torch.int64, pin_memory=partner.is_cuda)
        buffer = (ctypes.c_char * self._memory.nbytes).from_address(self._memory.data_ptr())
        self.words: memoryview[int] = memoryview(buffer).cast("B").cast("q")
        self._copied = torch.cuda.Event() if partner.is_cuda else None

    def send(self) -> None:
        """Enqueues a copy to the partner."""
        self._partner.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def fetch(self) -> None:
        """Enqueues a copy from the partner."""
        self._memory.copy_(self._partner, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Blocks until the last copy, if there was one, is complete."""
        if self._copied is not None:
            self._copied.synchronize()


class PinnedRing:
    """Takes what is to be sent to ``target`` [n] int64 again and again; waits only if a buffer is still being read."""

    def __init__(self, target: Tensor):
        self._buffers = cycle([PinnedWords(target) for _ in range(NUM_PINNED)])

    def send(self, words: array[int]) -> None:
        """Enqueues a copy of ``words`` [m] to the first m of the target. What lies behind them is of no meaning."""
        buffer = next(self._buffers)
        buffer.wait()
        buffer.words[: len(words)] = words
        buffer.send()
