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


@lru_cache
def device_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """``rows`` as int64 on the device, made once: few layouts serve an engine for life."""
    return torch.tensor(rows, dtype=torch.int64, device=device)
