"""Asynchronous copies from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``; a tensor that is already there is returned as it is.

    Torch's allocator does not reuse the pinned memory in between before the copy is complete.
    """
    if x.device == device:
        return x
    pinned = x.pin_memory()  # named, so that the traceback of an error holds it: freed on a lost device it would abort
    return pinned.to(device, non_blocking=True)
