"""Prefill attention on Hopper: which launches have a kernel of their own, and its arguments."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..formats import PageLayout
from ..nvidia import is_hopper

BLOCK_M, HEAD_DIM, TILE = 128, 256, 64  # of narrower heads it is no faster than the plain kernel
# Of Triton, first and last, in PyTorch 2.10 to 2.14. Gluon is experimental, and that of 3.9 writes of leaks at exit.
GLUON_VERSIONS = (3, 6), (3, 8)


@cache
def has_gluon() -> bool:
    """Whether Triton's version is one of ``GLUON_VERSIONS``."""
    first, last = GLUON_VERSIONS
    return first <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) <= last


def suits(
    page: PageLayout,
    dtype: torch.dtype,
    block_m: int,
    window: int | None,
    softcap: float | None,
    device: torch.device,
) -> bool:
    """Whether the kernel for Hopper takes launches over dense pages in query tiles of ``block_m`` rows of ``dtype``."""
    stored, has_rule = page.k.dense_dtype, window is not None or softcap is not None
    is_half = stored is not None and stored.itemsize == dtype.itemsize == 2
    is_large = block_m == BLOCK_M and page.k.shape.head_dim == HEAD_DIM
    return is_half and is_large and not has_rule and is_hopper(device) and has_gluon()


def kernel() -> Any:
    """The kernel, whose language not every version has."""
    from .hopper_kernel import prefill_hopper_kernel

    return prefill_hopper_kernel


def hopper_options(page: PageLayout, group: int, sink_tokens: int) -> dict[str, int]:
    """Compile-time arguments, but for the launch's place in the order, and warps."""
    shape = page.k.shape
    extent = {"H": shape.num_kv_heads, "G": group, "D": shape.head_dim, "T": shape.num_tokens, "S": sink_tokens}
    return {**extent, "BLOCK_M": BLOCK_M, "TILE": TILE, "num_warps": BLOCK_M // 16}


@cache
def tile_layout(dtype: torch.dtype) -> Any:
    """Gluon's layout of a tile of K or V in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], getattr(gl, str(dtype).removeprefix("torch.")))


def tile_rows(rows: Tensor) -> Any:
    """A descriptor of ``rows`` [R, D], fetched ``TILE`` at a time."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(rows, [TILE, HEAD_DIM], tile_layout(rows.dtype))
