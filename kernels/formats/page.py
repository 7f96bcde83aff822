"""Layout of a block's slot: the places of the sides of all layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from .family import Side, SideBytes

if TYPE_CHECKING:
    from torch import Tensor


class Place(NamedTuple):
    """Bytes from the start of a slot to the codes and to the metadata of a side."""

    codes: int
    meta: int


class Step(NamedTuple):
    """A side's places before and after its block is rewritten, and the new side's patterns in the request's bank."""

    source: Place
    target: Place
    bank: int = 0


@dataclass(frozen=True)
class PageLayout:
    """The page of one layer: its sides, where they lie in a slot, and their patterns' offsets in a bank."""

    k: Side
    v: Side
    k_place: Place
    v_place: Place
    k_bank: int = 0
    v_bank: int = 0

    @property
    def has_bank(self) -> bool:
        return self.k.bank_nbytes + self.v.bank_nbytes > 0

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Bytes from a slot's address to K's codes and metadata and V's codes and metadata."""
        return *self.k_place, *self.v_place

    @cached_property
    def span(self) -> tuple[int, int]:
        """First and last byte of the page, the last one excluded, as offsets in a slot."""
        sides = ((self.k, self.k_place), (self.v, self.v_place))
        ends = [e for s, p in sides for e in (p.codes + s.codes_nbytes, p.meta + s.meta_nbytes)]
        return min(self.offsets), max(ends)

    def rows(self, span: Tensor) -> tuple[SideBytes, SideBytes]:
        """K and V of n pages, views. Shapes:  span [n, ...] uint8, bytes from ``span[0]`` on"""
        first = self.span[0]
        return _rows(span, self.k, self.k_place, first), _rows(span, self.v, self.v_place, first)


def _rows(span: Tensor, side: Side, place: Place, first: int) -> SideBytes:
    codes, meta = place.codes - first, place.meta - first
    return SideBytes(span[:, codes : codes + side.codes_nbytes], span[:, meta : meta + side.meta_nbytes])


@dataclass(frozen=True)
class BlockLayout:
    """The sides of all layers and their places in a slot: K of layer 0, V of layer 0, K of layer 1, ..."""

    sides: tuple[Side, ...]
    places: tuple[Place, ...]
    nbytes: int

    @classmethod
    def stack(cls, sides: Iterable[Side]) -> BlockLayout:
        """The layout in which sides follow one another, each as its codes and then its metadata."""
        stacked, nbytes = tuple(sides), 0
        places: list[Place] = []
        for side in stacked:
            codes = nbytes if side.dominant is None else places[-2].codes
            places.append(Place(codes, nbytes + side.codes_nbytes))
            nbytes += side.nbytes
        return cls(stacked, tuple(places), nbytes)

    @cached_property
    def pages(self) -> tuple[PageLayout, ...]:
        """The page of each layer, as attention reads it."""
        sides = [side.dominant or side for side in self.sides]
        k, v = (zip(sides[i::2], self.places[i::2], self.bank_offsets[i::2], strict=True) for i in (0, 1))
        return tuple(
            PageLayout(k_side, v_side, k_place, v_place, k_bank, v_bank)
            for (k_side, k_place, k_bank), (v_side, v_place, v_bank) in zip(k, v, strict=True)
        )

    @cached_property
    def bank_offsets(self) -> tuple[int, ...]:
        """Bytes from the start of a bank to the patterns of each side, one after the other."""
        return tuple(accumulate((side.bank_nbytes for side in self.sides[:-1]), initial=0))

    @cached_property
    def bank_nbytes(self) -> int:
        """Bytes of a request's bank: the patterns of all layers, K and V; 0 if no side has patterns."""
        return sum(side.bank_nbytes for side in self.sides)

    @cached_property
    def has_dense(self) -> bool:
        return any(side.dense_dtype is not None for side in self.sides)

    @cached_property
    def has_codes(self) -> bool:
        return any(side.dense_dtype is None for side in self.sides)

    @cached_property
    def _hash(self) -> int:
        return hash((self.sides, self.places))

    def __hash__(self) -> int:
        """The hash, computed once: layouts have two sides a layer and are looked up in most steps."""
        return self._hash

    @lru_cache  # noqa: B019 - an engine has few layouts, for life
    def steps(self, target: BlockLayout) -> Mapping[tuple[Side, Side], list[Step]]:
        """The distinct (side here, side there) pairs, and where each occurs."""
        found: dict[tuple[Side, Side], list[Step]] = {}
        sides, places = zip(self.sides, target.sides, strict=True), zip(self.places, target.places, strict=True)
        for pair, place, bank in zip(sides, places, target.bank_offsets, strict=True):
            found.setdefault(pair, []).append(Step(*place, bank))
        return found
