"""The device functions of uniform sides."""

from __future__ import annotations

from ..family import TritonOps
from .demote_triton import demote_head
from .integer import integer_functions
from .seal_triton import seal_head
from .tile import load_tile

UNIFORM_TRITON = TritonOps(load_tile, seal_head, demote_head, integer_functions)
