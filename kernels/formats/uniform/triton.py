"""The device functions of uniform sides."""

from __future__ import annotations

from typing import Any

from ..family import TritonOps
from .demote_triton import demote_head
from .layout import UniformSide
from .seal_triton import seal_head
from .tile import load_tile


def integer_functions(side: UniformSide) -> tuple[Any, ...] | None:
    """None yet."""
    return None


UNIFORM_TRITON = TritonOps(load_tile, seal_head, demote_head, integer_functions)
