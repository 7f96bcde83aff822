"""Copies to the device that the host does not wait for."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

NUM_PINNED = 4  # buffers of a ring: more than steps are ever under way


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``; a tensor that is there already, itself.

    Torch's allocator gives the pinned memory in between to nobody else before the copy has been made.
    """
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)


class PinnedRing:
    """Pinned buffers of [n] int64 in turn, for copies that are made again and again: to pin anew costs more than both.

    A buffer is written again once the copy from it has been made, which may have to be waited for.
    """

    def __init__(self, num_words: int, device: torch.device):
        on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(num_words, dtype=torch.int64, pin_memory=on_gpu) for _ in range(NUM_PINNED)]
        self._copied = [torch.cuda.Event() for _ in range(NUM_PINNED)] if on_gpu else []
        self._next = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueues a copy of ``source`` [m] int64 on the host to the first m words of ``target`` on the device."""
        index, num_words = self._next, len(source)
        self._next = (index + 1) % len(self._buffers)
        if self._copied:
            self._copied[index].synchronize()
        buffer = self._buffers[index][:num_words]
        buffer.copy_(source)
        target[:num_words].copy_(buffer, non_blocking=True)
        if self._copied:
            self._copied[index].record()


@lru_cache
def device_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """``rows`` as int64 on the device, made once: few layouts serve an engine for life."""
    return torch.tensor(rows, dtype=torch.int64, device=device)
