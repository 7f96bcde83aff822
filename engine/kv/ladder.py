"""Rungs and ladders: in which format K and V of every layer of a block stand, and where each page lies in its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import BLOCK_TOKENS, KVConfig
from .formats import Format, PageShape, make_format

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rung:
    """A format for the K side and one for the V side of each layer; a whole block stands on one rung."""

    name: str
    k: Format
    v: Format
    shape: PageShape
    num_layers: int

    @property
    def k_nbytes(self) -> int:
        return self.k.codes_nbytes(self.shape) + self.k.meta_nbytes(self.shape)

    @property
    def v_nbytes(self) -> int:
        return self.v.codes_nbytes(self.shape) + self.v.meta_nbytes(self.shape)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one layer of a block: the K side, then the V side."""
        return self.k_nbytes + self.v_nbytes

    @property
    def block_nbytes(self) -> int:
        return self.num_layers * self.page_nbytes

    @property
    def meta_nbytes(self) -> int:
        """Metadata bytes of one block, all layers."""
        return self.num_layers * (self.k.meta_nbytes(self.shape) + self.v.meta_nbytes(self.shape))

    @property
    def token_nbytes(self) -> float:
        return self.block_nbytes / self.shape.num_tokens

    @property
    def effective_bits(self) -> float:
        """Bits per KV element with all metadata counted (docs/kv formula: 8 x block bytes / elements)."""
        elements = 2 * self.num_layers * self.shape.num_kv_heads * self.shape.num_tokens * self.shape.head_dim
        return 8 * self.block_nbytes / elements


@dataclass(frozen=True)
class Ladder:
    """The rungs a block may step down, widest first."""

    name: str
    rungs: tuple[Rung, ...]

    @property
    def widest(self) -> Rung:
        return self.rungs[0]

    @property
    def floor(self) -> Rung:
        return self.rungs[-1]


def build_ladder(config: KVConfig, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Ladder:
    """The ladder of ``config`` for a model that computes in ``dtype``."""
    shape = PageShape(num_kv_heads, BLOCK_TOKENS, head_dim)
    rungs = []
    for name in config.rungs:
        fmt = make_format(name, dtype)
        rungs.append(Rung(name, fmt, fmt, shape, num_layers))
    return Ladder(config.name, tuple(rungs))
