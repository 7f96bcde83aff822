"""Graded sides: channels in falling order of importance, in runs of 8, 4, 2 and 1 bits; the last ones have means alone.

The order of channels is the basis's, so a run is the same channels in every page. A group is a channel of the page, of
K and of V, with (min, range) and codes as in uniform sides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from qkv_engine.errors import ConfigError

from ..family import PageShape, Side, SideName
from ..uniform import UniformSide
from ..uniform.layout import META_NBYTES, HeadSide, RunSpec

WIDTHS = (8, 4, 2, 1)
UNIT = 16  # channels: runs are multiples, so that rows of codes lie at even addresses
MEAN_BITS = 4  # of the codes that a mean is computed from: the widest that every block has had
ETA = Fraction(1, 5)  # of runs of 1 bit

_NAME = re.compile(r"graded((?:-[1-9][0-9]{0,3}x[8421])+)", re.ASCII)
_REMEDY = 'Choose "graded-" and runs such as 16x4-48x2: CHANNELSxBITS, channels by 16, bits 8, 4, 2 and 1 in this order'


class ChannelRun(NamedTuple):
    """Consecutive channels of equal width."""

    channels: int
    bits: int


class GradedSpec(NamedTuple):
    """Compile-time layout of a graded side, for device functions. Strides and offsets in bytes.

    ``IS_K``: lanes are rows, else columns. ``CODED``: channels with codes. ``CODES``, ``META``: of one head. ``TOP``:
    from the metadata's start to the largest ranges.
    """

    IS_K: bool
    RUNS: tuple[RunSpec, ...]
    CODED: int
    CODES: int
    META: int
    TOP: int


@dataclass(frozen=True)
class GradedSide(HeadSide):
    """One side of a page, x ~ min + share * range in the channels of ``runs`` and the mean in all channels behind them.

    Codes: per head run after run, each the plane sets of a uniform side of that many channels.
    Metadata: per head min ``[C]`` and range ``[C]`` of the C channels with codes, mean ``[D - C]`` of the others, fp16;
    then (``top_offset``) the largest range of each head's channels with codes, ``[H]`` fp16.
    """

    runs: tuple[ChannelRun, ...]

    @property
    def coded(self) -> int:
        """Channels with codes."""
        return sum(run.channels for run in self.runs)

    @property
    def head_codes_nbytes(self) -> int:
        return sum(side.head_codes_nbytes for side in self.run_sides)

    @property
    def head_meta_nbytes(self) -> int:
        return META_NBYTES * self.coded + 2 * (self.shape.head_dim - self.coded)

    @cached_property
    def run_sides(self) -> tuple[UniformSide, ...]:
        """Each run as the uniform side whose codes it has."""
        return tuple(self._part(*run, ETA if run.bits == 1 else Fraction(0)) for run in self.runs)

    @cached_property
    def spec(self) -> GradedSpec:
        channels = accumulate((run.channels for run in self.runs), initial=0)
        codes = accumulate((side.head_codes_nbytes for side in self.run_sides), initial=0)
        runs = tuple(
            RunSpec(first, side.shape.head_dim, side.bits, float(side.eta), offset)
            for first, offset, side in zip(channels, codes, self.run_sides, strict=False)
        )
        sizes = self.head_codes_nbytes, self.head_meta_nbytes, self.top_offset
        return GradedSpec(self.name == "k", runs, self.coded, *sizes)

    def uniform(self, bits: int) -> UniformSide:
        """The side of ``bits``-bit codes of all channels with the same (min, range)."""
        return self._part(self.shape.head_dim, bits)

    def _part(self, channels: int, bits: int, eta: Fraction = Fraction(0)) -> UniformSide:
        tokens = self.shape.num_tokens
        shape = PageShape(self.shape.num_kv_heads, tokens, channels)
        return UniformSide(self.name, shape, bits, "channel", tokens, eta)


@dataclass(frozen=True)
class Graded:
    """The first channels of a head in ``runs`` of falling width, the mean over the page of each other channel.

    Raises ``ConfigError`` unless there are runs, each of a multiple of 16 channels, of 8, 4, 2 or 1 bits, widest first.
    """

    runs: tuple[ChannelRun, ...]

    def __post_init__(self) -> None:
        falling = all(a.bits > b.bits for a, b in pairwise(self.runs)) and all(run.bits in WIDTHS for run in self.runs)
        if not self.runs or not falling:
            raise ConfigError("not runs of falling width", field="format", value=self.name, remedy=_REMEDY)
        if any(run.channels % UNIT or run.channels < UNIT for run in self.runs):
            raise ConfigError(f"{UNIT} must divide every run", field="format", value=self.name, remedy=_REMEDY)

    @property
    def name(self) -> str:
        return "graded-" + ("-".join(f"{run.channels}x{run.bits}" for run in self.runs) or "0")

    @property
    def bits(self) -> float:
        """Code bits per element of the channels that have codes; how many have none depends on the head dim."""
        return sum(run.channels * run.bits for run in self.runs) / sum(run.channels for run in self.runs)

    def layout(self, shape: PageShape, side: SideName) -> GradedSide:
        """The layout of K or V. Raises ``ConfigError`` for a head of fewer channels, or one that 8 does not divide."""
        if shape.head_dim % 8:
            remedy = "Choose a uniform format"
            raise ConfigError("needs a head dim that 8 divides", field="format", value=self.name, remedy=remedy)
        layout = GradedSide(side, shape, self.runs)
        if layout.coded > shape.head_dim:
            remedy = f"Choose runs of at most {shape.head_dim // UNIT * UNIT} channels together"
            message = f"has codes of {layout.coded} channels, the head has {shape.head_dim}"
            raise ConfigError(message, field="format", value=self.name, remedy=remedy)
        return layout


def parse(name: str) -> Graded | None:
    """The format called ``name``, ``None`` for other families' names. Raises ``ConfigError`` for wrong runs."""
    if not name.startswith("graded"):
        return None
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError("unknown KV format", field="format", value=name, remedy=_REMEDY)
    return Graded(tuple(ChannelRun(*map(int, run.split("x"))) for run in found[1][1:].split("-")))


def check_step(old: Side, new: GradedSide) -> None:
    """Raises ``ValueError`` unless ``demote`` leads from ``old`` to ``new``, or they are equal."""
    if not isinstance(old, UniformSide) or old not in (new.uniform(8), new.uniform(4)):
        raise ValueError("graded sides step down from sides per channel alone, of 8 or 4 bits in groups of 128")
    if old.bits < new.runs[0].bits:
        raise ValueError(f"no demotion leads from {old.bits} to {new.runs[0].bits} bits")
