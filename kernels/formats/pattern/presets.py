"""Ladders down to PatternKV's rung. The planner has none: a profile has no request whose patterns could be mined."""

from __future__ import annotations

from qkv_engine.config import BLOCK_TOKENS, DENSE16, KVConfig, RungConfig


def pattern_rung(bits: int, num_patterns: int = 32, num_later: int = 0) -> RungConfig:
    """PatternKV's formats: the axes of ``uniform_rung``, over tokens minus one of their request's patterns.

    ``num_patterns`` are mined from the prompt; the first ``num_later`` windows after it add one each.
    """
    patterns = f"patterns{num_patterns}" + (f"-later{num_later}" if num_later else "")
    k, v = (f"int{bits}-{axis}-{BLOCK_TOKENS}-{patterns}" for axis in ("channel", "token"))
    return RungConfig(f"int{bits}-patterns", k, v)


# PatternKV (arXiv 2510.05176) at 2 bits, without and with a sink.
PRESETS = tuple(
    KVConfig(name=name, rungs=(DENSE16, pattern_rung(2)), sink=sink, recent=128, eager=True)
    for name, sink in (("patternkv", 0), ("patternkv-sink", 32))
)
