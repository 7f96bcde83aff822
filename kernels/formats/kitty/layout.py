"""Kitty sides of K: 2-bit codes of all channels, 4-bit codes of the boosted ones.

A page has one (min, range) a channel. The codes of a head are a 2-bit plane set of all channels, as in uniform sides,
and behind it a plane set of the boosted channels alone, in ascending order, with the high bits of their codes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from typing import NamedTuple

from qkv_engine.errors import ConfigError

from ..family import PageShape, SideName
from ..uniform import UniformSide
from ..uniform.layout import META_NBYTES, TILES, HeadSide

MAX_CHANNELS = 256  # a channel number is a byte
HEAD_ALIGN = 16  # bytes: the metadata of every head starts where wide copies can

_NAME = re.compile(r"kitty-([0-9]{1,3}(?:\.[0-9]{1,6})?)(?:-(variance|random))?", re.ASCII)
_REMEDY = 'Choose kitty-PERCENT, PERCENT from 0 to 100 such as 12.5, then nothing, "-variance" or "-random"'


class Ranking(IntEnum):
    """The score by which a page's channels are boosted: mean magnitude, variance, or a hash as the control."""

    MAGNITUDE = 0
    VARIANCE = 1
    RANDOM = 2


class KittySpec(NamedTuple):
    """Compile-time layout of a Kitty side, for device functions. Strides and offsets in bytes.

    ``BITS``: of the set of all channels. ``BOOSTED``: channels with two bits more. ``RANKING``: a ``Ranking``.
    ``CODES``, ``META``: of one head. ``NUMBERS``: from the start of a head's metadata to the numbers of boosted
    channels. ``TOP``: from the metadata's start to the largest ranges.
    """

    BITS: int
    BOOSTED: int
    RANKING: int
    CODES: int
    META: int
    NUMBERS: int
    TOP: int


@dataclass(frozen=True)
class KittySide(HeadSide):
    """K of a page as codes, x ~ min + code * range / 15 in ``boosted`` channels, else / 3; (min, range) per channel.

    Codes: per head ``[T / 4][D]`` with the low two bits of every channel's code, then ``[T / 4][boosted]`` with the
    high two bits of the boosted channels' codes.
    Metadata: per head ``[2 (min, range)][D]`` fp16, the sign bit of the range set in boosted channels; the numbers of
    boosted channels, ascending, uint8; zeros up to a multiple of 16 bytes. Then (``top_offset``) the largest range of
    each head, ``[H]`` fp16.
    """

    boosted: int
    ranking: Ranking

    @property
    def head_codes_nbytes(self) -> int:
        return self.shape.num_tokens // TILES * (self.shape.head_dim + self.boosted)

    @property
    def numbers_offset(self) -> int:
        """Bytes from the start of a head's metadata to the numbers of boosted channels."""
        return META_NBYTES * self.shape.head_dim

    @property
    def head_meta_nbytes(self) -> int:
        return -(-(self.numbers_offset + self.boosted) // HEAD_ALIGN) * HEAD_ALIGN

    @property
    def spec(self) -> KittySpec:
        return KittySpec(
            2,
            self.boosted,
            int(self.ranking),
            self.head_codes_nbytes,
            self.head_meta_nbytes,
            self.numbers_offset,
            self.top_offset,
        )

    def uniform(self, bits: int) -> UniformSide:
        """The side of ``bits``-bit codes with the same (min, range)."""
        return UniformSide(self.name, self.shape, bits, "channel", self.shape.num_tokens)


@dataclass(frozen=True)
class Kitty:
    """K with ``percent`` of its channels boosted from 2 to 4 bits, chosen anew in every page and head by ``ranking``.

    Raises ``ConfigError`` for a percentage outside 0 to 100.
    Source: Kitty (arXiv 2511.18643), which boosts 12.5 % and, as Kitty-Pro, 25 %.
    """

    percent: Decimal
    ranking: Ranking = Ranking.MAGNITUDE

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 100:
            raise ConfigError("not a percentage", field="format", value=self.name, remedy=_REMEDY)

    @property
    def name(self) -> str:
        suffix = "" if self.ranking == Ranking.MAGNITUDE else f"-{self.ranking.name.lower()}"
        return f"kitty-{self.percent.normalize():f}{suffix}"

    @property
    def bits(self) -> float:
        return float(2 + self.percent / 50)

    def layout(self, shape: PageShape, side: SideName) -> KittySide:
        """The layout of K. Raises ``ConfigError`` for V and for a head dim above 256."""
        if side == "v":
            remedy = 'Choose a format per token for V, such as "int2-token-128"'
            raise ConfigError("a format of K alone", field="format", value=self.name, remedy=remedy)
        if shape.head_dim > MAX_CHANNELS:
            remedy = "Choose a uniform format"
            raise ConfigError(f"has at most {MAX_CHANNELS} channels", field="format", value=self.name, remedy=remedy)
        return KittySide(side, shape, int(shape.head_dim * self.percent / 100), self.ranking)


def parse(name: str) -> Kitty | None:
    """The format called ``name``, ``None`` for other families' names. Raises ``ConfigError`` for a wrong percentage."""
    if not name.startswith("kitty"):
        return None
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError("unknown KV format", field="format", value=name, remedy=_REMEDY)
    return Kitty(Decimal(found[1]), Ranking[found[2].upper()] if found[2] else Ranking.MAGNITUDE)
