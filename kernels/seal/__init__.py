"""Sealing: full dense blocks become codes with metadata."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import BlockLayout
from .reference import seal_reference


def seal(
    memory: Tensor,
    src: Tensor,
    dst: Tensor,
    source: BlockLayout,
    target: BlockLayout,
    finite: Tensor | None = None,
    banks: Tensor | None = None,
    num_windows: Tensor | None = None,
) -> Tensor:
    """Writes the blocks at ``src`` in the ``target`` layout at ``dst``: all dense sides, a launch a format.

    A side that is dense in both layouts is copied. Other sides of ``source`` are left to ``demote``. Padding
    bytes are not written. A block's bytes do not depend on the other blocks of the call.

    Shapes:  memory [M] uint8;  src, dst [n] int64, byte addresses of slots, none of which overlap;
             finite [n] int64, ones, made if not given;  banks [n] int64, byte addresses of the banks of the
             blocks' requests, for a target with patterns;  num_windows [n] int64, windows after the request's prompt
             up to the block, whose patterns it may choose from, zeros if not given
    Returns: ``finite``, 0 for a block that holds a NaN or an infinity (stored as 0: codes and metadata stay finite)
    Errors:  ValueError if a dense side changes its dtype
    """
    for old, new in source.steps(target):
        if old.dense_dtype is not None and new.dense_dtype not in (None, old.dense_dtype):
            raise ValueError(f"a dense side keeps its dtype: {old} -> {new}")
    if finite is None:
        finite = torch.ones(len(src), dtype=torch.int64, device=memory.device)
    if memory.is_cuda:
        from .triton import seal_triton

        seal_triton(memory, src, dst, source, target, finite, banks, num_windows)
    else:
        from .cpu import seal_cpu

        seal_cpu(memory, src, dst, source, target, finite, banks, num_windows)
    return finite


__all__ = ["seal", "seal_reference"]
