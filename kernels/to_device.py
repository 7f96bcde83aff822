"""Asynchronous copies from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of tensors that come in one copy: kernels are compiled for pointers so aligned


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``; a tensor that is already there is returned as it is.

    See ``all_to_device``.
    """
    return all_to_device((x,), device)[0]


def all_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of host tensors on ``device``, brought in one copy, since each takes the host some 40 us.

    Tensors that are already there are returned as they are. Torch's allocator does not reuse the pinned memory in
    between before the copy is complete.
    """
    here = [x for x in tensors if x.device != device]
    if not here:
        return list(tensors)
    nbytes = sum(_padded_nbytes(x) for x in here)
    # Named, so that the traceback of an error holds it: freed on a lost device it would abort.
    pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for target, source in zip(parts_of(pinned, here), here, strict=True):
        copy_here(target, source)
    moved = iter(parts_of(pinned.to(device, non_blocking=True), here))
    return [x if x.device == device else next(moved) for x in tensors]


def parts_of(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``memory`` [n] uint8 with shapes and dtypes of ``like``, one behind the other, each aligned."""
    found, first = list[Tensor](), 0
    for x in like:
        found.append(memory[first : first + x.nbytes].view(x.dtype).view(x.shape))
        first += _padded_nbytes(x)
    return found


def _padded_nbytes(x: Tensor) -> int:
    return -(-x.nbytes // ALIGNMENT) * ALIGNMENT


def copy_here(target: Tensor, source: Tensor) -> None:
    """Copies host tensors of equal shape and dtype in the calling thread.

    Torch wakes its threads for more than 32,768 elements, which takes up to 6 ms where the copy itself takes .05.
    """
    if source.numel():  # bytes of none have no view
        np.copyto(_bytes(target), _bytes(source.contiguous()))


def _bytes(x: Tensor) -> np.ndarray:
    return x.view(-1).view(torch.uint8).numpy()
