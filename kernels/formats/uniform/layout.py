"""Uniform sides: integer codes of 8, 4, 3, 2 or 1 bits with a minimum and a range per group.

A page has four token tiles of T / 4 tokens; lane l of tile j is token j T / 4 + l. A plane set of width w is

    width   K bytes of a head      V bytes of a head      token t, channel d is
    8       [T, D]                 [D, T]                 the byte
    4       [T / 2, D]             [D, T / 2]             lane t % (T / 2), nibble t // (T / 2)
    2       [T / 4, D]             [D, T / 4]             lane t % (T / 4), bits 2 j and 2 j + 1 of tile j
    1       [T / 4, D / 2]         [D / 2, T / 4]         lane t % (T / 4), channel d % (D / 2), bit 4 (2 d // D) + j

and 3 bits are a set of the low two bits, then a set of the high bit. So one shift and one ``and`` on a whole tile of
bytes give a run of consecutive tokens, and every set has at least T / 4 lanes, as many as an integer dot is deep.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from qkv_engine.errors import ConfigError

from ..family import PageShape, Side, SideName

Axis = Literal["channel", "token"]

BITS = (8, 4, 3, 2, 1)
GROUPS = (32, 64, 128)
AXES: tuple[Axis, ...] = ("channel", "token")
META_NBYTES = 4  # one (min, range) pair in fp16
TILES = 4  # token tiles of a page


class UniformSpec(NamedTuple):
    """Compile-time layout of a uniform side, for device functions. Strides and offsets in bytes.

    ``IS_K``: lanes are rows, else columns. ``PER_TOKEN``: a group is ``GROUP`` channels of one token, else ``GROUP``
    tokens of one channel. ``CODES``, ``META``: of one head. ``TOP``: from the metadata's start to the largest ranges.
    """

    IS_K: bool
    BITS: int
    PER_TOKEN: bool
    GROUP: int
    GROUPS: int
    CODES: int
    META: int
    TOP: int


@dataclass(frozen=True)
class UniformSide(Side):
    """One side of a page as integer codes, x ~ min + code * range / (2^bits - 1), (min, range) per group.

    Codes: per head ``head_codes_nbytes``, plane sets as above.
    Metadata: per head ``head_meta_nbytes`` of fp16,
        axis channel: ``[2 (min, range)][num_groups][D]``, a group being ``group`` tokens of one channel;
        axis token:   ``[num_groups][T / 4 lanes][4 tiles][2 (min, range)]``, a group being ``group`` channels of one
        token;
    then (``top_offset``) the largest range of each head, ``[H]`` fp16.
    """

    bits: int
    axis: Axis
    group: int

    @property
    def num_groups(self) -> int:
        """Groups along the axis; the last one of a head is smaller if ``group`` does not divide it."""
        return -(-self._extent // self.group)

    @property
    def max_code(self) -> int:
        return int(2**self.bits - 1)

    @property
    def head_codes_nbytes(self) -> int:
        return self.shape.num_tokens * self.bits * self.shape.head_dim // 8

    @property
    def head_meta_nbytes(self) -> int:
        return META_NBYTES * self.num_groups * self.across

    @property
    def across(self) -> int:
        """Groups side by side: channels, or tokens."""
        return self.shape.head_dim if self.axis == "channel" else self.shape.num_tokens

    @property
    def top_offset(self) -> int:
        """Bytes from the start of the metadata to the largest ranges."""
        return self.shape.num_kv_heads * self.head_meta_nbytes

    @property
    def codes_nbytes(self) -> int:
        return self.shape.num_kv_heads * self.head_codes_nbytes

    @property
    def meta_nbytes(self) -> int:
        return self.top_offset + 2 * self.shape.num_kv_heads

    @property
    def spec(self) -> UniformSpec:
        return UniformSpec(
            self.name == "k",
            self.bits,
            self.axis == "token",
            self.group,
            self.num_groups,
            self.head_codes_nbytes,
            self.head_meta_nbytes,
            self.top_offset,
        )

    @property
    def _extent(self) -> int:
        return self.shape.num_tokens if self.axis == "channel" else self.shape.head_dim


@dataclass(frozen=True)
class Uniform:
    """x ~ min + code * range / (2^bits - 1) over groups of ``group`` elements along one axis.

    ``axis`` "channel": a group is ``group`` tokens of one channel (KIVI's K). "token": ``group`` channels of
    one token (V, and PM-KVQ's K); the last group of a head is smaller if ``group`` does not divide the head
    dim, and a group larger than the head is the whole head. Raises ``ConfigError`` for other bits, axes or
    groups.
    Source: KIVI (arXiv 2402.02750); (min, range) for (scale, zero), so that a demotion changes codes only.
    """

    bits: int
    axis: Axis
    group: int

    def __post_init__(self) -> None:
        for field, value, choices in (
            ("bits", self.bits, BITS),
            ("axis", self.axis, AXES),
            ("group", self.group, GROUPS),
        ):
            if value not in choices:
                raise ConfigError("not supported", field=field, value=value, remedy=f"Choose from {choices}")

    @property
    def name(self) -> str:
        return f"int{self.bits}-{self.axis}-{self.group}"

    def layout(self, shape: PageShape, side: SideName) -> UniformSide:
        """Where the bytes of one side lie. Raises ``ConfigError`` for an odd head dim with an odd number of bits."""
        if self.bits % 2 and shape.head_dim % 2:
            remedy = "Choose 8, 4 or 2 bits"
            raise ConfigError("needs an even head dim", field="format", value=self.name, remedy=remedy)
        extent = shape.num_tokens if self.axis == "channel" else shape.head_dim
        return UniformSide(side, shape, self.bits, self.axis, min(self.group, extent))


def uniform_formats() -> dict[str, Uniform]:
    """Every uniform format by its name."""
    formats = (Uniform(*choice) for choice in product(BITS, AXES, GROUPS))
    return {fmt.name: fmt for fmt in formats}
