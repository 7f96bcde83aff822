"""Ladders down to the sign rung, and the formats that the planner may choose."""

from __future__ import annotations

from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.kernels.formats.family import SideFormats

SIGN_RUNG = RungConfig("sign", "sign-8", "sign-8")
PRESETS = (KVConfig(name="sign", rungs=(DENSE16, SIGN_RUNG), sink=32, eager=True),)
CANDIDATES = SideFormats(k=("sign-8",), v=("sign-8",))
