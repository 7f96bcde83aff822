"""Where the sides of all layers lie in a block's slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch import Tensor

from .family import Side, SideBytes


class Place(NamedTuple):
    """Bytes from the start of a slot to the codes and to the metadata of a side."""

    codes: int
    meta: int


class Step(NamedTuple):
    """Where a side lies before and after its block is rewritten."""

    source: Place
    target: Place


@dataclass(frozen=True)
class PageLayout:
    """The page of one layer: its sides, and where they lie in a slot."""

    k: Side
    v: Side
    k_place: Place
    v_place: Place

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
        sides, places = [side.dominant or side for side in self.sides], self.places
        return tuple(PageLayout(sides[i], sides[i + 1], places[i], places[i + 1]) for i in range(0, len(sides), 2))

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
        """Worked out once: layouts have two sides a layer, and are looked up in most steps."""
        return self._hash

    @lru_cache  # noqa: B019 - an engine has few layouts, for life
    def steps(self, target: BlockLayout) -> Mapping[tuple[Side, Side], list[Step]]:
        """The distinct (side here, side there) pairs, and where each occurs."""
        found: dict[tuple[Side, Side], list[Step]] = {}
        for old, new, source, there in zip(self.sides, target.sides, self.places, target.places, strict=True):
            found.setdefault((old, new), []).append(Step(source, there))
        return found
