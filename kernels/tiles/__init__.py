"""How attention kernels read pages: one tile loader a family of formats, passed to the kernels as a constexpr function.

A loader returns ``[TILE, BLOCK_D]`` elements of one KV head; the kernels know nothing else about a page.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import DenseSide, Side, UniformSide


@dataclass(frozen=True)
class PageFormat:
    """How one layer of the blocks on one rung is read: its sides and their offsets in bytes from a slot's address."""

    k: Side
    v: Side
    k_offset: int
    v_offset: int

    @property
    def has_integer_dots(self) -> bool:
        """Whether the codes can go into the integer dots as they are: whole-page K groups, whole-head V groups."""
        k, v = self.k, self.v
        if isinstance(k, DenseSide) or isinstance(v, DenseSide):
            return False
        same_bits = k.bits == v.bits and k.bits in (8, 4, 2)
        return same_bits and (k.axis, v.axis) == ("channel", "token") and k.num_groups == v.num_groups == 1


__all__ = ["DenseSide", "PageFormat", "UniformSide"]
