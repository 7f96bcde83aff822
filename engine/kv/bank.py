"""The bank of a request: patterns, from which tokens of its sealed blocks are stored as differences. No torch.

Patterns are mined once, from the first tokens of the request, right before the first of its blocks is sealed. Where the
ladder keeps room for them, each later window of a block's tokens adds one, its centre, right before it is sealed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .block import Block


class Mining(NamedTuple):
    """The tokens that a bank is mined from: the first ``num_tokens`` of the dense blocks at ``addresses``, in order."""

    addresses: list[int]
    num_tokens: int


class Centres(NamedTuple):
    """The windows whose centres are added to a bank: the dense blocks at ``addresses``, numbered from ``first`` on."""

    first: int
    addresses: list[int]


@dataclass(slots=True, eq=False)
class Bank:
    """The patterns of one request, in the slot of ``block``.

    ``blocks`` are those of the request, in token order. Tokens are counted from the first one that is in a block. A
    window is a block behind those that the prompt fills, or behind the first; the first ``most_windows`` add a pattern.
    """

    block: Block
    blocks: list[Block]
    num_prompt_tokens: int
    block_tokens: int
    most_windows: int = 0
    num_windows: int = 0  # whose centres are in the bank
    num_computed_tokens: int = 0  # as of the last search for blocks that may step down
    is_mined: bool = False

    def mine(self) -> Mining | None:
        """The tokens to mine, in the wave that seals the first block while all are dense; ``None`` from then on.

        Mined is the prompt as far as it is computed, and at least the first block, which is full by then.
        """
        if self.is_mined:
            return None
        self.is_mined = True
        num_tokens = min(max(self.num_prompt_tokens, self.block_tokens), self.num_computed_tokens)
        return Mining([block.slot.address for block in self.blocks[: -(-num_tokens // self.block_tokens)]], num_tokens)

    def windows_until(self, block: Block) -> int:
        """The windows up to ``block`` that add a pattern. From no others may the block's tokens choose.

        So its codes depend on its request's tokens alone, in whatever order blocks are sealed.
        """
        if not self.most_windows:
            return 0
        return min(max(0, self.blocks.index(block) + 1 - self._first_window), self.most_windows)

    def add_centres(self, num_windows: int) -> Centres | None:
        """The windows, all dense, that lack their patterns, of the first ``num_windows``; ``None`` for none."""
        if num_windows <= self.num_windows:
            return None
        first, self.num_windows = self.num_windows, num_windows
        windows = self.blocks[self._first_window + first : self._first_window + num_windows]
        return Centres(first, [block.slot.address for block in windows])

    @property
    def _first_window(self) -> int:
        return max(1, self.num_prompt_tokens // self.block_tokens)
