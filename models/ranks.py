"""Tensor parallelism: the ranks that share a model's layers, one process and device each.

A column-parallel projection has a part of the output's features on each rank, a row-parallel one a part of the input's;
the sum over the ranks completes its output (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """Features ``[first, first + size)`` of ``whole``."""

    size: int
    first: int
    whole: int

    @classmethod
    def all(cls, size: int) -> Part:
        """All of ``size`` features."""
        return cls(size, 0, size)

    def times(self, number: int) -> Part:
        """The same part where each feature stands for ``number``, as a head for its channels."""
        return Part(self.size * number, self.first * number, self.whole * number)


@dataclass(frozen=True)
class Ranks:
    """One rank of a tensor-parallel group of ``size``. Alone, it has all features and nothing to add up."""

    rank: int = 0
    size: int = 1

    def part(self, whole: int) -> Part:
        """The rank's equal part of ``whole`` features; of fewer features than ranks a single one, which ranks share."""
        size = max(1, whole // self.size)
        return Part(size, self.rank * whole // self.size, whole)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks, the same bits on each; ``x`` may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """``x`` [N, C] of all ranks side by side, [N, C * size]."""
        return x


ALONE = Ranks()
