"""The bank of a request: patterns, from which tokens of its sealed blocks are stored as differences. No torch.

Patterns are mined once, from the first tokens of the request, right before the first of its blocks is sealed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..config import BLOCK_TOKENS

if TYPE_CHECKING:
    from .block import Block


class Mining(NamedTuple):
    """The tokens that a bank is mined from: the first ``num_tokens`` of the dense blocks at ``addresses``, in order."""

    addresses: list[int]
    num_tokens: int


@dataclass(slots=True, eq=False)
class Bank:
    """The patterns of one request, in the slot of ``block``.

    ``blocks`` are those of the request, in token order. Tokens are counted from the first one that is in a block.
    """

    block: Block
    blocks: list[Block]
    num_prompt_tokens: int
    num_computed_tokens: int = 0  # as of the last search for blocks that may step down
    is_mined: bool = False

    def mine(self) -> Mining | None:
        """The tokens to mine, in the wave that seals the first block while all are dense; ``None`` from then on.

        Mined is the prompt as far as it is computed, and at least the first block, which is full by then.
        """
        if self.is_mined:
            return None
        self.is_mined = True
        num_tokens = min(max(self.num_prompt_tokens, BLOCK_TOKENS), self.num_computed_tokens)
        return Mining([block.slot.address for block in self.blocks[: -(-num_tokens // BLOCK_TOKENS)]], num_tokens)
