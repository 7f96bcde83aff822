"""Sizes of KV memory as plain numbers: all that the books and the scheduler know of formats and models. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..window import RecentWindow


class RungSize(NamedTuple):
    """A block's size on one rung: ``nbytes`` of a slot, and the fewest code ``bits`` of any side.

    ``has_dense``: some side is not coded, so values that are not finite may be found when it steps down.
    """

    name: str
    nbytes: int
    bits: float
    has_dense: bool = False


class RequestSlot(NamedTuple):
    """A slot that each request has beside its blocks, from the first one on and for life.

    ``num_tokens``: the request's first tokens that the slot holds, 0 for one that holds none. ``nbytes``: at most a
    dense block's, a multiple of 16. ``num_elements``: KV elements, 0 for metadata.
    """

    name: str
    num_tokens: int
    nbytes: int
    num_elements: int


@dataclass(frozen=True)
class GroupSpec:
    """Layers whose KV lives in the same blocks: the rungs of a block, widest first, and the slots of a request.

    At most one of the ``slots`` holds tokens, and it comes first; a bank comes last. Blocks in the ``recent`` window of
    a request stay on the first rung. ``visible``: tokens that attention looks back; None for all. ``num_windows``:
    windows of a request after its prompt that add a pattern to its bank. ``align``: bytes that slabs are a multiple of.
    """

    layers: tuple[int, ...]
    block_tokens: int
    rungs: tuple[RungSize, ...]
    slots: tuple[RequestSlot, ...]
    recent: RecentWindow
    visible: int | None = None
    has_bank: bool = False
    num_windows: int = 0
    align: int = 1

    @property
    def widest(self) -> RungSize:
        """The first rung, on which blocks begin."""
        return self.rungs[0]

    @cached_property
    def sink(self) -> int:
        """Tokens of a request that come before its blocks and stay dense for life."""
        return sum(slot.num_tokens for slot in self.slots)

    @property
    def num_token_slots(self) -> int:
        """Slots of a request that hold tokens: 1 or 0."""
        return int(self.sink > 0)

    def in_blocks(self, num_tokens: int) -> int:
        """Those of a request's first ``num_tokens`` tokens that lie in blocks; negative within its slot."""
        return num_tokens - self.sink

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a request of ``num_tokens`` tokens, full ones and the one begun."""
        return -(-max(0, self.in_blocks(num_tokens)) // self.block_tokens)

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of a request with ``num_blocks`` full blocks, after which its next block begins."""
        return self.sink + num_blocks * self.block_tokens


@dataclass(frozen=True)
class KVSpec:
    """Groups of layers, and when their blocks step down.

    ``eager``: blocks step to the last rung as soon as they may; otherwise only when memory runs short. ``admit_at``:
    the rung that admission counts with.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    eager: bool
    admit_at: int

    @property
    def group(self) -> GroupSpec:
        """The only group: all layers of a model live in the same blocks."""
        (group,) = self.groups
        return group
