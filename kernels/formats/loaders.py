"""Compile-time arguments by which kernels with floating-point dots read pages: tile loaders and layout records."""

from __future__ import annotations

from typing import Any

import torch

from .dense.triton import TL_DTYPE
from .page import PageLayout


def page_loaders(page: PageLayout) -> dict[str, Any]:
    """Tile loaders of both sides, their records, and the dtype of the elements that they give."""
    return {
        "LOAD_K": page.k.family.triton().load_tile,
        "K_SIDE": page.k.spec,
        "LOAD_V": page.v.family.triton().load_tile,
        "V_SIDE": page.v.spec,
        "DTYPE": TL_DTYPE[loaded_dtype(page)],
    }


def loaded_dtype(page: PageLayout) -> torch.dtype:
    """The dtype in which tiles of a page are loaded, and in which kernels compute their dots."""
    return page.k.dense_dtype or page.v.dense_dtype or torch.float16
