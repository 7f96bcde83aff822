"""The bank of a request: patterns that the tokens of its sealed blocks are stored as differences from. No torch.

Some patterns are mined from the prompt when the request's first block is sealed; each block behind the prompt adds
another one, its centre. A block may use those that were there when it was sealed, so blocks are sealed in token order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from qkv_engine.kernels.mine import num_mined

from ..config import BLOCK_TOKENS

if TYPE_CHECKING:
    from .block import Block


class Mining(NamedTuple):
    """The tokens that a bank is mined from: the first ``num_tokens`` of the dense blocks at ``addresses``, in order."""

    addresses: list[int]
    num_tokens: int


class Sealing(NamedTuple):
    """A block's part of its request's bank.

    Fields
        address: of the bank, in bytes.
        limit: leading patterns that the block may use, its own included.
        centre: index of the pattern that the block adds; -1 for none.
        mining: of the bank, before the request's first block is sealed; None for all others.
    """

    address: int
    limit: int
    centre: int
    mining: Mining | None = None


@dataclass(slots=True, eq=False)
class Bank:
    """The patterns of one request, at most ``num_patterns``, in the slot of ``block``.

    ``blocks`` are those of the request, in token order. Tokens are counted from the first one that is in a block.
    """

    block: Block
    blocks: list[Block]
    num_patterns: int
    num_prompt_tokens: int
    num_computed_tokens: int = 0  # as of the last look at what may step down
    num_sealed: int = 0
    num_mined: int = 0

    def seals_next(self, block: Block) -> bool:
        """Whether ``block`` is the first that is not sealed."""
        return self.blocks[self.num_sealed] is block

    def seal(self) -> Sealing:
        """The part of the next block, which is sealed in the wave that begins or is under way."""
        mining = None if self.num_sealed else self._mine()
        later = self.num_sealed - self.num_prompt_tokens // BLOCK_TOKENS  # blocks behind the prompt before this one
        self.num_sealed += 1
        address, centre = self.block.slot.address, self.num_mined + later
        if later < 0:
            return Sealing(address, self.num_mined, -1, mining)
        if centre < self.num_patterns:
            return Sealing(address, centre + 1, centre, mining)
        return Sealing(address, self.num_patterns, -1, mining)

    def _mine(self) -> Mining:
        """The prompt as far as it is computed, while all blocks are dense."""
        num_tokens = max(0, min(self.num_prompt_tokens, self.num_computed_tokens))
        self.num_mined = num_mined(self.num_patterns, num_tokens)
        return Mining([block.slot.address for block in self.blocks[: -(-num_tokens // BLOCK_TOKENS)]], num_tokens)
