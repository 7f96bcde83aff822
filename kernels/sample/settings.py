"""Sampling settings of rows, packed so that one copy brings all rows to the device."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from torch import Tensor

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e30  # below, float32 logits are greedy; above, all are alike
ROW = struct.Struct("<dddqQ")
_U64 = (1 << 64) - 1


class Settings(NamedTuple):
    """Sampling settings, one row for each row of logits; ``pack_settings`` makes the bytes of a row.

    rows [M, 5] int64: scale, floor and top_p are the bits of float64s, then top_k and the seed's state. Scores are
    scale x (logit - peak), in units of log2, and never above 0; scale 0 is greedy. Tokens whose score is below the
    floor have no weight. positions [M] int64 count a row's draws. ``limited``: some row has a top_k or top_p.
    """

    rows: Tensor
    positions: Tensor
    limited: bool


def pack_settings(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> bytes:
    """Settings of one row, valid as long as its request. Temperature 0 is greedy; top_k 0 and -1 are no limit."""
    scale = 1 / (math.log(2) * min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)) if temperature > 0 else 0.0
    floor = math.log2(min_p) if min_p > 0 else -math.inf
    return ROW.pack(scale, floor, top_p, max(top_k, 0), _mix(seed & _U64))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments (SplitMix64 mixing, twice)."""
    return draw_number(_mix(seed & _U64), position)


def draw_number(state: int, position: int) -> float:
    """``uniform`` from the mixed state of a seed."""
    return (_mix((state ^ position) & _U64) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)
