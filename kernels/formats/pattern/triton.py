"""The device functions of pattern sides."""

from __future__ import annotations

from ..family import TritonOps
from .integer import integer_functions
from .seal_triton import demote_head, seal_head
from .tile import load_tile

PATTERN_TRITON = TritonOps(load_tile, seal_head, demote_head, integer_functions)
