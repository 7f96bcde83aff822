"""Sign sides: the sign of each element, and the mean of the absolute values of eight channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats.family import PageShape, Side, SideName

GROUP = 8  # channels of one token: a byte of signs


class SignSpec(NamedTuple):
    """``GROUPS``: groups of a token in one head."""

    GROUPS: int


@dataclass(frozen=True)
class SignSide(Side):
    """Codes ``[H, T, D / 8]`` uint8, bit c set unless channel c of the group is negative; means, the same in fp16."""

    @property
    def num_groups(self) -> int:
        """Groups of all tokens and heads."""
        return self.shape.num_kv_heads * self.shape.num_tokens * self.shape.head_dim // GROUP

    @property
    def codes_nbytes(self) -> int:
        return self.num_groups

    @property
    def meta_nbytes(self) -> int:
        return 2 * self.num_groups

    @property
    def spec(self) -> SignSpec:
        return SignSpec(self.shape.head_dim // GROUP)


@dataclass(frozen=True)
class Sign:
    """The format ``sign-8``, for K and V alike."""

    name = "sign-8"
    bits = 1.0

    def layout(self, shape: PageShape, side: SideName) -> SignSide:
        """Where the bytes of one side lie. Raises ``ConfigError`` for a head dim that 8 does not divide."""
        if shape.head_dim % GROUP:
            remedy = "Choose a format of another family"
            raise ConfigError("needs a head dim that 8 divides", field="format", value=self.name, remedy=remedy)
        return SignSide(side, shape)
