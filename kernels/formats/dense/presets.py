"""Ladders of the dense rung alone."""

from __future__ import annotations

from qkv_engine.config import DENSE16, KVConfig, RungConfig

from ..family import SideFormats

PRESETS = (
    KVConfig(name="bf16", rungs=(DENSE16,)),
    KVConfig(name="fp32", rungs=(RungConfig("dense32", "dense32", "dense32"),)),
)
CANDIDATES = SideFormats(("dense16",), ("dense16",))
