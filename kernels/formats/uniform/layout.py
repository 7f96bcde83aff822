"""Uniform sides: integer codes of 8, 4, 3, 2 or 1 bits with a minimum and a range per group.

A page has four token tiles of T / 4 tokens; lane l of tile j is token j T / 4 + l. A plane set of width w is

    width   K bytes of a head      V bytes of a head      token t, channel d is
    8       [T, D]                 [D, T]                 the byte
    4       [T / 2, D]             [D, T / 2]             lane t % (T / 2), nibble t // (T / 2)
    2       [T / 4, D]             [D, T / 4]             lane t % (T / 4), bits 2 j and 2 j + 1 of tile j
    1       [T / 4, D / 2]         [D / 2, T / 4]         lane t % (T / 4), channel d % (D / 2), bit 4 (2 d // D) + j

and 3 bits are a set of the low two bits, then a set of the high bit. So one shift and one ``and`` on a whole tile of
bytes give a run of consecutive tokens, and every set has at least T / 4 lanes, the depth of an integer dot.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Literal, NamedTuple

from qkv_engine.errors import ConfigError

from ..family import PageShape, Side, SideName

Axis = Literal["channel", "token"]

BITS = (8, 4, 3, 2, 1)
GROUPS = (32, 64, 128)
AXES: tuple[Axis, ...] = ("channel", "token")
META_NBYTES = 4  # one (min, range) pair in fp16
TILES = 4  # token tiles of a page

_ETA = re.compile(r"[0-9]\.[0-9]{1,6}|[0-9]{1,3}/[1-9][0-9]{0,2}", re.ASCII)
_ETA_REMEDY = "Choose at least 0 and less than 1/2, such as 0.045 or 1/6"


class RunSpec(NamedTuple):
    """Compile-time layout of plane sets of consecutive channels, (min, range) per channel of the page.

    ``FIRST``, ``CHANNELS``: of the head's channels. ``BITS``, ``ETA``: as in ``UniformSpec``. ``CODES``: bytes from the
    head's codes to these.
    """

    FIRST: int
    CHANNELS: int
    BITS: int
    ETA: float
    CODES: int


class UniformSpec(NamedTuple):
    """Compile-time layout of a uniform side, for device functions. Strides and offsets in bytes.

    ``IS_K``: lanes are rows, else columns. ``PER_TOKEN``: a group is ``GROUP`` channels of one token, else ``GROUP``
    tokens of one channel. ``CODES``, ``META``: of one head; a subordinate side has no ``CODES``. ``TOP``: from the
    metadata's start to the largest ranges. ``ETA``: share of the range by which the levels are drawn in at each end.
    ``RUNS``: all channels, for functions of sides that have several runs.
    """

    IS_K: bool
    BITS: int
    PER_TOKEN: bool
    GROUP: int
    GROUPS: int
    CODES: int
    META: int
    TOP: int
    ETA: float
    RUNS: tuple[RunSpec, ...]


@dataclass(frozen=True)
class HeadSide(Side):
    """A side whose heads follow one another: all codes, all metadata, then the largest range of each head, fp16."""

    @property
    @abstractmethod
    def head_codes_nbytes(self) -> int:
        """Bytes of the codes of one head."""

    @property
    @abstractmethod
    def head_meta_nbytes(self) -> int:
        """Bytes of the metadata of one head, its largest range not counted."""

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


@dataclass(frozen=True)
class UniformSide(HeadSide):
    """One side of a page as integer codes, x ~ min + share * range, (min, range) per group.

    ``eta`` draws the levels in from both ends of the range: share = eta + (1 - 2 eta) code / (2^bits - 1). Codes and
    metadata do not depend on it. A subordinate side has no codes; see ``Side.dominant``.
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
    eta: Fraction = Fraction(0)
    is_subordinate: bool = False

    @property
    def dominant(self) -> UniformSide | None:
        return replace(self, is_subordinate=False) if self.is_subordinate else None

    @property
    def num_groups(self) -> int:
        """Groups along the axis; the last one of a head is smaller if ``group`` does not divide it."""
        extent = self.shape.num_tokens if self.axis == "channel" else self.shape.head_dim
        return -(-extent // self.group)

    @property
    def max_code(self) -> int:
        return int(2**self.bits - 1)

    @property
    def head_codes_nbytes(self) -> int:
        return 0 if self.is_subordinate else self.shape.num_tokens * self.bits * self.shape.head_dim // 8

    @property
    def head_meta_nbytes(self) -> int:
        return META_NBYTES * self.num_groups * self.across

    @property
    def across(self) -> int:
        """Groups side by side: channels, or tokens."""
        return self.shape.head_dim if self.axis == "channel" else self.shape.num_tokens

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
            float(self.eta),
            (RunSpec(0, self.shape.head_dim, self.bits, float(self.eta), 0),),
        )


@dataclass(frozen=True)
class Uniform:
    """x ~ min + share * range over groups of ``group`` elements along one axis; see ``UniformSide``.

    ``axis`` "channel": a group is ``group`` tokens of one channel (KIVI's K). "token": ``group`` channels of
    one token (V, and PM-KVQ's K); the last group of a head is smaller if ``group`` does not divide the head
    dim, and a group larger than the head is the whole head. Raises ``ConfigError`` for other bits, axes or
    groups, and for ``eta`` outside [0, 1/2).
    Source: KIVI (arXiv 2402.02750); (min, range) for (scale, zero), so that a demotion changes codes only. ``eta`` is
    XQuant's calibration, and subordinate sides are its cross-layer sharing.
    """

    bits: int
    axis: Axis
    group: int
    eta: Fraction = Fraction(0)
    is_subordinate: bool = False

    def __post_init__(self) -> None:
        for field, value, choices in (
            ("bits", self.bits, BITS),
            ("axis", self.axis, AXES),
            ("group", self.group, GROUPS),
        ):
            if value not in choices:
                raise ConfigError("not supported", field=field, value=value, remedy=f"Choose from {choices}")
        if not 0 <= self.eta < Fraction(1, 2):
            raise ConfigError("outside its range", field="eta", value=str(self.eta), remedy=_ETA_REMEDY)

    @property
    def name(self) -> str:
        eta = f"-eta{_spell(self.eta)}" if self.eta else ""
        return f"int{self.bits}-{self.axis}-{self.group}{eta}" + ("-subordinate" if self.is_subordinate else "")

    def layout(self, shape: PageShape, side: SideName) -> UniformSide:
        """The layout of one side. Raises ``ConfigError`` for an odd head dim with an odd number of bits."""
        if self.bits % 2 and shape.head_dim % 2:
            remedy = "Choose 8, 4 or 2 bits"
            raise ConfigError("needs an even head dim", field="format", value=self.name, remedy=remedy)
        extent = shape.num_tokens if self.axis == "channel" else shape.head_dim
        return UniformSide(side, shape, self.bits, self.axis, min(self.group, extent), self.eta, self.is_subordinate)


@cache
def uniform_formats() -> Mapping[str, Uniform]:
    """Every uniform format by its name, made once: a ladder of all layers asks for them some fifty times."""
    formats = (Uniform(*choice) for choice in product(BITS, AXES, GROUPS))
    return MappingProxyType({fmt.name: fmt for fmt in formats})


def parse(name: str) -> Uniform | None:
    """The format of a plain name followed by an eta or "subordinate"; ``None`` for other names.

    Raises ``ConfigError`` for a wrong eta.
    """
    base, suffix, rest = name.partition("-subordinate")
    plain, _, eta = base.partition("-eta")
    found = uniform_formats().get(plain)
    if found is None or rest:
        return None
    if base != plain and not _ETA.fullmatch(eta):
        raise ConfigError("not a number", field="eta", value=eta, remedy=_ETA_REMEDY)
    return replace(found, eta=Fraction(eta or 0), is_subordinate=bool(suffix))


def _spell(eta: Fraction) -> str:
    """Decimals where six of them are exact, else a fraction."""
    return f"{float(eta):.6f}".rstrip("0") if 10**6 % eta.denominator == 0 else str(eta)


def check_step(old: Side, new: UniformSide) -> None:
    """Raises ``ValueError`` unless ``demote`` leads from ``old`` to ``new``, or they are equal."""
    if not isinstance(old, UniformSide):
        raise ValueError(f"no demotion leads from {old.family.name} to uniform sides")
    if (old.name, old.axis, old.group) != (new.name, new.axis, new.group):
        raise ValueError("a demotion keeps side, axis and group")
    if old.is_subordinate and not new.is_subordinate:
        raise ValueError("a subordinate side has no codes of its own")
    if old.bits != new.bits and (new.bits > old.bits or 3 in (old.bits, new.bits)):
        raise ValueError(f"no demotion leads from {old.bits} to {new.bits} bits")
