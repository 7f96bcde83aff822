"""Asynchronous copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``; a tensor that is already there is returned as it is.

    Torch's allocator does not reuse the pinned memory in between before the copy is complete.
    """
    if x.device == device:
        return x
    # Named, so that the traceback of an error holds it: freed on a lost device it would abort.
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    copy_here(pinned, x)
    return pinned.to(device, non_blocking=True)


def copy_here(target: Tensor, source: Tensor) -> None:
    """Copies host tensors of equal shape and dtype in the calling thread.

    Torch wakes its threads for more than 32,768 elements, which takes up to 6 ms where the copy itself takes .05.
    """
    if source.numel():  # bytes of none have no view
        np.copyto(_bytes(target), _bytes(source.contiguous()))


def _bytes(x: Tensor) -> np.ndarray:
    return x.view(-1).view(torch.uint8).numpy()
