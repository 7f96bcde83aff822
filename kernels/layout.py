"""Where the bytes of a block lie: what kernels that read and write pages are told. The formats compute it.

A block is one contiguous slot: layer after layer, the K side of the layer's page and then the V side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

import torch

Axis = Literal["channel", "token"]
SideName = Literal["k", "v"]


@dataclass(frozen=True)
class DenseSide:
    """One side of a page as ``[H, T, D]`` elements of ``dtype``."""

    dtype: torch.dtype
    num_kv_heads: int
    num_tokens: int
    head_dim: int
    nbytes: int


@dataclass(frozen=True)
class UniformSide:
    """One side of a page as integer codes, x ~ min + code * range / (2^bits - 1), (min, range) per group.

    Codes (offset 0): per head ``head_codes_nbytes``, plane sets as in ``kernels.bits``.
    Metadata (``meta_offset``): per head ``head_meta_nbytes`` of fp16,
        axis channel: ``[2 (min, range)][num_groups][D]``, a group being ``group`` tokens of one channel;
        axis token:   ``[num_groups][meta_lanes][meta_planes][2 (min, range)]``, a group being ``group``
        channels of one token, token t at lane t % meta_lanes of plane t // meta_lanes.
    Top (``top_offset``): the largest range of each head, ``[H]`` fp16.
    All offsets and strides are multiples of 16 bytes from the start of the side.
    """

    side: SideName
    bits: int
    axis: Axis
    group: int
    num_groups: int
    num_kv_heads: int
    num_tokens: int
    head_dim: int
    head_codes_nbytes: int
    head_meta_nbytes: int
    meta_offset: int
    top_offset: int
    nbytes: int

    @property
    def max_code(self) -> int:
        return int(2**self.bits - 1)

    @property
    def meta_planes(self) -> int:
        """Token planes of the metadata tile: as the codes', at most 4 (the integer dot is 32 tokens deep)."""
        return {8: 1, 4: 2}.get(self.bits, 4)

    @property
    def meta_lanes(self) -> int:
        return self.num_tokens // self.meta_planes


Side = DenseSide | UniformSide


def check_step(old: Side, new: Side) -> None:
    """Raises ``ValueError`` unless a side can be rewritten from ``old`` to ``new`` by a copy, a seal or a demotion."""
    if isinstance(old, DenseSide):
        if isinstance(new, DenseSide) and new.dtype != old.dtype:
            raise ValueError("a dense side keeps its dtype")
        return
    if not isinstance(new, UniformSide):
        raise ValueError("a sealed side cannot become dense again")
    if (old.side, old.axis, old.group) != (new.side, new.axis, new.group):
        raise ValueError("a demotion keeps side, axis and group")
    if old.bits != new.bits and (new.bits > old.bits or 3 in (old.bits, new.bits)):
        raise ValueError(f"no demotion leads from {old.bits} to {new.bits} bits")


@dataclass(frozen=True)
class BlockLayout:
    """The sides of all layers in slot order: K of layer 0, V of layer 0, K of layer 1, ..."""

    sides: tuple[Side, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Bytes from the start of the slot to each side."""
        return tuple(accumulate((side.nbytes for side in self.sides[:-1]), initial=0))

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.sides)

    @cached_property
    def has_dense(self) -> bool:
        return any(isinstance(side, DenseSide) for side in self.sides)

    @cached_property
    def _hash(self) -> int:
        return hash(self.sides)

    def __hash__(self) -> int:
        """Worked out once: layouts have two sides a layer, and are looked up in most steps."""
        return self._hash

    @lru_cache  # noqa: B019 - an engine has few layouts, for life
    def pairs(self, target: BlockLayout) -> Mapping[tuple[Side, Side], list[tuple[int, int]]]:
        """The distinct (side here, side there) pairs and, for each, the offsets (here, there) where it occurs."""
        found: dict[tuple[Side, Side], list[tuple[int, int]]] = {}
        sides = zip(self.sides, target.sides, self.offsets, target.offsets, strict=True)
        for old, new, from_offset, to_offset in sides:
            found.setdefault((old, new), []).append((from_offset, to_offset))
        return found
