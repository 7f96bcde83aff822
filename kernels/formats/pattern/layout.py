"""Pattern sides: codes of each token's residual, the token minus its nearest pattern.

Patterns are per request, layer, side and KV head; they lie in the request's bank, apart from its blocks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from qkv_engine.errors import ConfigError

from ..family import SIDE_ALIGN, PageShape, Side, SideName
from ..uniform import Uniform, UniformSide
from ..uniform.layout import RunSpec, uniform_formats
from ..uniform.layout import check_step as check_residual_step

NO_PATTERN = 255  # index of a token stored as it is
MAX_PATTERNS = 255  # an index is a byte
MIN_ROWS = 16  # patterns that a matrix instruction takes at a time; the bank is padded to them
Z_95 = 1.6448536269514722  # 95 % quantile of the normal distribution: alpha = .05

_REMEDY = (
    f'Choose a uniform format without eta, "-patterns" and a number, perhaps "-later" and another: 1 to {MAX_PATTERNS} '
    "together"
)
_NUMBERS = re.compile(r"([0-9]{1,9})(?:-later([0-9]{1,9}))?", re.ASCII)


class PatternSpec(NamedTuple):
    """Compile-time layout of a pattern side, for device functions: the fields of ``UniformSpec`` are its residual's.

    ``INDEX``: bytes from the start of the metadata to that of the residual. ``ROWS``: patterns of the bank, zeros
    included. ``STRIDE``: elements from one of a head's patterns to the next. ``RHO``: see ``gate``. ``MINED`` patterns
    are the prompt's, ``LATER`` follow of the windows after it.
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
    INDEX: int
    ROWS: int
    STRIDE: int
    RHO: float
    MINED: int
    LATER: int


@dataclass(frozen=True)
class PatternSide(Side):
    """One side of a page as ``residual`` codes of x - pattern, for patterns chosen a token and head.

    Codes: those of the residual.
    Metadata: indices uint8, ``NO_PATTERN`` for a token stored as it is, K ``[H][T / 4 lanes][4 tiles]``, V ``[H][T]``;
    then the residual's metadata.
    Bank: ``[num_rows][H][D]`` fp16: ``mined`` patterns of the prompt, ``later`` of the windows after it, then zeros.
    """

    residual: UniformSide
    mined: int
    later: int

    @property
    def num_patterns(self) -> int:
        return self.mined

    @property
    def num_later(self) -> int:
        return self.later

    @property
    def codes_nbytes(self) -> int:
        return self.residual.codes_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes of the indices, which lie before the residual's metadata."""
        return self.shape.num_kv_heads * self.shape.num_tokens

    @property
    def meta_nbytes(self) -> int:
        return self.index_nbytes + self.residual.meta_nbytes

    @property
    def num_rows(self) -> int:
        """Patterns of the bank, padding included."""
        return max(MIN_ROWS, 1 << (self.mined + self.later - 1).bit_length())

    @property
    def bank_nbytes(self) -> int:
        return -(-self.num_rows * self.pattern_nbytes // SIDE_ALIGN) * SIDE_ALIGN

    @property
    def spec(self) -> PatternSpec:
        stride, rho = self.pattern_nbytes // 2, gate(self.shape.head_dim)
        return PatternSpec(*self.residual.spec, self.index_nbytes, self.num_rows, stride, rho, self.mined, self.later)

    def visible_nbytes(self, num_windows: int) -> int:
        return self.pattern_nbytes * (self.mined + min(num_windows, self.later)) if self.later else self.bank_nbytes


@dataclass(frozen=True)
class Pattern:
    """The ``residual`` format of x - pattern, for up to ``num_patterns`` patterns a request, layer and KV head.

    ``num_later`` windows after the prompt add a pattern each, the paper's eq. 5.
    Raises ``ConfigError`` for a number that a byte cannot index, and for a residual with an eta or without codes.
    Source: PatternKV (arXiv 2510.05176), with a bank a request and a byte a token for the index.
    """

    residual: Uniform
    num_patterns: int
    num_later: int = 0

    def __post_init__(self) -> None:
        number = self.num_patterns + self.num_later
        if not (self.num_patterns >= 1 and self.num_later >= 0 and number <= MAX_PATTERNS):
            raise ConfigError("not a number of patterns", field="patterns", value=number, remedy=_REMEDY)
        if self.residual.eta or self.residual.is_subordinate:
            raise ConfigError("patterns go with plain codes", field="format", value=self.name, remedy=_REMEDY)

    @property
    def name(self) -> str:
        later = f"-later{self.num_later}" if self.num_later else ""
        return f"{self.residual.name}-patterns{self.num_patterns}{later}"

    @property
    def bits(self) -> float:
        return self.residual.bits

    def layout(self, shape: PageShape, side: SideName) -> PatternSide:
        """The layout of one side. Raises ``ConfigError`` for K per token and V per channel."""
        if self.residual.axis != ("channel" if side == "k" else "token"):
            remedy = 'Choose "channel" for K and "token" for V'
            raise ConfigError("patterns need the other axis", field="format", value=self.name, remedy=remedy)
        return PatternSide(side, shape, self.residual.layout(shape, side), self.num_patterns, self.num_later)


def parse(name: str) -> Pattern | None:
    """The format called ``name``, ``None`` for other families' names. Raises ``ConfigError`` for a wrong number."""
    base, found, number = name.rpartition("-patterns")
    residual = uniform_formats().get(base)
    if not found or residual is None:
        return None
    numbers = _NUMBERS.fullmatch(number)
    if numbers is None or numbers[2] == "0":
        raise ConfigError("not a number of patterns", field="patterns", value=number, remedy=_REMEDY)
    return Pattern(residual, int(numbers[1]), int(numbers[2] or 0))


def gate(head_dim: int) -> float:
    """rho*, the largest range of a V residual as a share of the token's own at which a pattern pays.

    The root of 1 - rho^2 = 2 z / sqrt(5 d) sqrt(1 + rho^4), z the 95 % quantile of the normal distribution; 0 for head
    dims so small that there is none.
    """
    c = 4 * Z_95**2 / (5 * head_dim)
    return math.sqrt((1 - math.sqrt(1 - (1 - c) ** 2)) / (1 - c)) if c < 1 else 0.0


def check_step(old: Side, new: PatternSide) -> None:
    """Raises ``ValueError`` unless ``demote`` leads from ``old`` to ``new``, or they are equal."""
    if not isinstance(old, PatternSide):
        raise ValueError(f"no demotion leads from {old.family.name} to pattern sides")
    if (old.mined, old.later) != (new.mined, new.later):
        raise ValueError(f"a demotion keeps the number of patterns, {old.mined} and {old.later} later ones")
    check_residual_step(old.residual, new.residual)
