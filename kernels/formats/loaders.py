"""Compile-time arguments by which kernels with floating-point dots read pages: tile loaders and layout records."""

from __future__ import annotations

from typing import Any

import torch

from .dense.triton import TL_DTYPE
from .page import PageLayout


def page_loaders(page: PageLayout) -> dict[str, Any]:
    """Tile loaders of both sides, their records, and the dtype that the kernel computes its dots in."""
    dtype = page.k.dense_dtype or page.v.dense_dtype or torch.float16
    return {
        "LOAD_K": page.k.family.triton().load_tile,
        "K_SIDE": page.k.spec,
        "LOAD_V": page.v.family.triton().load_tile,
        "V_SIDE": page.v.spec,
        "DTYPE": TL_DTYPE[dtype],
    }
