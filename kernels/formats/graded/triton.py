"""The device functions of graded sides."""

from __future__ import annotations

from ..family import TritonOps
from .integer import integer_functions
from .tile import load_tile
from .write_triton import demote_head, seal_head

GRADED_TRITON = TritonOps(load_tile, seal_head, demote_head, integer_functions, seal_warps=8)  # codes of a few widths
