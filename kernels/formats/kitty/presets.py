"""Ladders down to Kitty's rungs."""

from __future__ import annotations

from qkv_engine.config import DENSE16, KVConfig, RungConfig

from ..family import SideFormats
from ..uniform.presets import uniform_rung

# K per channel at 2 bits, the named share of a page's channels at 4; V per token at 2 bits.
KITTY_RUNG = RungConfig("kitty", "kitty-12.5", "int2-token-128")
KITTY_PRO_RUNG = RungConfig("kitty-pro", "kitty-25", "int2-token-128")

PRESETS = (
    KVConfig(name="kitty", rungs=(DENSE16, KITTY_RUNG), sink=32, recent=128, eager=True),
    KVConfig(name="kitty-pro", rungs=(DENSE16, KITTY_PRO_RUNG), sink=32, recent=128, eager=True),
    KVConfig(name="auto-2", rungs=(DENSE16, uniform_rung(8), uniform_rung(4), KITTY_PRO_RUNG), sink=32),
)
CANDIDATES = SideFormats(k=("kitty-25", "kitty-12.5"))
