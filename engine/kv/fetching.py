"""The way back from the host tier for one waiting request: the pieces that it lacks, and room for them. No torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..request import Request
from .block import Block
from .host_piece import HostBlock, HostPiece
from .shortage import Shortage
from .table import BlockTables

if TYPE_CHECKING:
    from .host_traffic import HostTraffic


class Missing(NamedTuple):
    """Copies of piece ``number`` of a request that KV memory lacks."""

    number: int
    piece: HostPiece
    copies: Sequence[HostBlock]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.slot.nbytes for copy in self.copies)


class Fetching:
    """Fetches ``missing`` pieces of ``request``, in order; implements ``scheduler.space.FetchLike`` until ``end``.

    ``held``: cached blocks beside them that it will begin on, which do not make room meanwhile.
    ``is_under_way``: whether some piece is on its way.
    """

    def __init__(
        self,
        tables: BlockTables,
        traffic: HostTraffic,
        request: Request,
        missing: Sequence[Missing],
        held: Sequence[Block],
        is_under_way: bool,
    ):
        self.is_under_way = is_under_way
        self._tables, self._traffic, self._request = tables, traffic, request
        self._missing, self._held = deque(missing), held
        self._first: tuple[int, dict[int, int]] = -1, {}  # spare blocks, and what is wanted with them
        for block in held:
            tables.store.share(block)

    @property
    def has_next(self) -> bool:
        """Whether there is a piece more that may be copied beside the next step."""
        if not self._missing:
            return False
        return self._is_kept(self._missing[0]) and self._traffic.may_copy(self._missing[0].nbytes)

    def has_room(self, spare: int) -> bool:
        """Whether the next piece has room beside the first block of its request, and ``spare`` ones."""
        return self._tables.arena.has_room(self._all(spare))

    def shortage(self, spare: int) -> Shortage:
        """The room that the next piece lacks then."""
        return Shortage(self._tables, self._all(spare))

    def fetch(self) -> bool:
        """Has the next piece fetched, for which there is room; ``False`` if the host gave it up for what made room."""
        if not self._is_kept(self._missing[0]):
            return False
        number, piece, copies = missing = self._missing.popleft()
        for copy in copies:
            block = self._tables.store.new_idle_block(self._tables.groups[copy.group], copy.rung)
            self._traffic.tier.fetch(piece, copy, block)
        self._traffic.count(missing.nbytes)
        self._request.num_fetched_pieces = number + 1
        self.is_under_way = True
        return True

    def end(self) -> None:
        """Lets go of the blocks beside the pieces; those that are idle are the most recently used ones then."""
        for block in reversed(self._held):
            self._tables.store.drop(block)

    def _is_kept(self, missing: Missing) -> bool:
        return all(self._traffic.tier.is_kept(missing.piece, copy) for copy in missing.copies)

    def _all(self, spare: int) -> dict[int, int]:
        """Slots by size of the next piece, and of what is wanted beside it."""
        if self._first[0] != spare:
            self._first = spare, self._wanted(spare)
        wanted = self._first[1].copy()
        for copy in self._missing[0].copies:
            wanted[copy.slot.nbytes] = wanted.get(copy.slot.nbytes, 0) + 1
        return wanted

    def _wanted(self, spare: int) -> dict[int, int]:
        """Slots by size of a request's first blocks behind a prefix, and of ``spare`` blocks in each group."""
        wanted = Counter(self._tables.dense(1 + spare))
        for group in self._tables.spec.groups:
            wanted.update(slot.nbytes for slot in group.slots[group.num_token_slots :])
        return dict(wanted)
