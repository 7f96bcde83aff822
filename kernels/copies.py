"""Copies to the device that the host does not wait for."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """``x`` in memory that ``device`` copies from on its own; on the CPU ``x`` itself.

    Torch's allocator gives the memory to nobody else before copies begun from it have been made.
    """
    return x.pin_memory() if device.type == "cuda" else x


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``; a tensor that is there already, itself."""
    return x if x.device == device else pinned(x, device).to(device, non_blocking=True)


class PinnedRing:
    """Pinned buffers of [n] int64 in turn, for copies that are made again and again: to pin anew costs more than both.

    A buffer is written again once the copy from it has been made, which may have to be waited for.
    """

    def __init__(self, num_words: int, device: torch.device, count: int = 4):
        on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(num_words, dtype=torch.int64, pin_memory=on_gpu) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in range(count)] if on_gpu else []
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
