"""Sealing: full dense blocks become codes with (min, range) metadata."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout
from .reference import quantize, seal_reference


def seal(
    memory: Tensor,
    src: Tensor,
    dst: Tensor,
    source: BlockLayout,
    target: BlockLayout,
    finite: Tensor | None = None,
) -> Tensor:
    """Writes the blocks at ``src``, sealed, at ``dst``: every dense side, in all layers, in one launch.

    A side that is dense in both layouts is copied. Uniform sides of ``source`` are left to ``demote``. Padding
    bytes are not written. A block's bytes do not depend on the other blocks of the call.

    Shapes:  memory [M] uint8;  src, dst [n] int64, byte addresses of slots, none of which overlap;
             finite [n] int64, ones, made if not given
    Returns: ``finite``, 0 for a block that holds a NaN or an infinity (stored as 0: codes and metadata stay finite)
    Errors:  ValueError if a dense side changes its dtype
    Source:  KIVI (arXiv 2402.02750) with (min, range) metadata; see ``quantize`` for the arithmetic
    """
    for old, new in source.pairs(target):
        if type(old) is type(new) and getattr(old, "dtype", None) != getattr(new, "dtype", None):
            raise ValueError(f"a dense side keeps its dtype: {old} -> {new}")
    if finite is None:
        finite = torch.ones(len(src), dtype=torch.int64, device=memory.device)
    if memory.is_cuda:
        from .triton import seal_triton

        seal_triton(memory, src, dst, source, target, finite)
    else:
        from .cpu import seal_cpu

        seal_cpu(memory, src, dst, source, target, finite)
    return finite


__all__ = ["quantize", "seal", "seal_reference"]
