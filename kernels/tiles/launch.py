"""Sides of a page as compile-time arguments of a kernel."""

from __future__ import annotations

import torch
import triton.language as tl

from . import DenseSide, PageFormat, UniformSide
from .dense import load_dense
from .uniform import load_uniform

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def page_constexprs(page: PageFormat) -> dict[str, object]:
    """Tile loaders of both sides, what they need to know, and the dtype that the kernel computes its dots in."""
    dense = [side.dtype for side in (page.k, page.v) if isinstance(side, DenseSide)]
    dtype = TL_DTYPE[dense[0] if dense else torch.float16]
    return {**_side_constexprs("K", page.k), **_side_constexprs("V", page.v), "DTYPE": dtype}


def _side_constexprs(name: str, side: DenseSide | UniformSide) -> dict[str, object]:
    if isinstance(side, DenseSide):
        values = (load_dense, 8 * side.dtype.itemsize, False, 0, TL_DTYPE[side.dtype])
    else:
        across = side.num_tokens if side.axis == "token" else side.head_dim
        assert side.head_meta_nbytes == 4 * side.num_groups * across and side.num_tokens % 32 == 0
        values = (load_uniform, side.bits, side.axis == "token", side.group, tl.float16)
    keys = ("LOAD_{}", "{}_BITS", "{}_PER_TOKEN", "{}_GROUP", "{}_STORED")
    return {key.format(name): value for key, value in zip(keys, values, strict=True)}
