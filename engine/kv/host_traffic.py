"""What moves between the prefix cache and the host tier: blocks that leave, that may leave, that come back. No torch.

A block that is given up leaves a copy, unless one as wide is kept. Idle blocks that can step down no more are copied
ahead of that, beside the steps, so that giving them up costs nothing. A request that waits has the pieces that it lacks
fetched, in the order of its tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ..request import Request
from .block import Block
from .disk import Disk
from .disk_traffic import IDLE_NBYTES, DiskTraffic
from .fetching import Fetching, Missing
from .host_piece import HostBlock, HostPiece
from .host_tier import HostTier
from .idle import Entry
from .table import BlockTables

if TYPE_CHECKING:
    from .prefix import PrefixCache

TURN_NBYTES = 2**29  # fetched by one command while nothing runs: the next one is made up meanwhile


class HostTraffic:
    """Notes copies between the blocks of ``prefix`` and ``tier``; owned by the prefix cache.

    ``disk``: where the tier's copies are saved; None if they are not.
    """

    def __init__(self, prefix: PrefixCache, tables: BlockTables, tier: HostTier, disk: Disk | None = None):
        self.tier = tier
        self.disk = None if disk is None else DiskTraffic(prefix, tier, disk)
        self._prefix, self._tables = prefix, tables
        self._is_idle = True  # nothing runs
        self._nbytes_left = 0  # of the copies beside this step
        self._has_copied = False  # whether any were noted in this step
        prefix.idle.watch_settled()

    def reset_counters(self) -> None:
        """Counts bytes and tokens anew."""
        self.tier.reset_counters()
        if self.disk is not None:
            self.disk.reset_counters()

    def begin_step(self, nbytes: int | None) -> None:
        """Files the blocks that have come since the last step; ``nbytes`` may be copied beside the next one."""
        self._is_idle = nbytes is None
        self._nbytes_left, self._has_copied = TURN_NBYTES if nbytes is None else nbytes, False
        if self.disk is not None:
            self.disk.begin_step()
        landed = self.tier.begin_step()
        for block, piece, copy, _ in landed:
            if self.tier.is_kept(piece, copy):
                blocks: list[Block | None] = [None] * len(self._tables.groups)
                blocks[block.group] = block
                self._prefix.file(piece.key, piece.parent, piece.tokens, blocks, piece.tenant)
        for fetch in reversed(landed):  # the beginning of a prefix falls idle last
            self._tables.store.drop(fetch.block)

    # ---- out

    def move_out(self, entry: Entry, blocks: Iterable[Block | None]) -> bool:
        """Has ``blocks`` of an entry leave copies; whether there are copies of all then."""
        number = len(self._tables.store.waves)
        out = [
            self.tier.move_out(entry.key, entry.parent, entry.tokens, block, number, entry.tenant)
            for block in blocks
            if block is not None
        ]
        return all(out)

    def park(self, blocks: Iterable[Block]) -> int:
        """Has those of a request's ``blocks`` that are filed leave copies, the first tokens first, while there is room.

        What is behind those without a copy would be of no use. Returns the tokens of the main group of which there
        are copies then.
        """
        main, num_tokens = self._tables.main.index, 0
        pieces: dict[Entry, list[Block]] = {}  # in the order of their tokens
        for block in sorted(blocks, key=lambda block: block.group != main):
            entry = self._prefix.entry_of(block)
            if entry is not None:
                pieces.setdefault(entry, []).append(block)
        self.tier.touch([entry.key for entry in pieces])
        for entry, own in pieces.items():
            has_copy = [block.group for block in own if self.move_out(entry, [block])]
            num_tokens += len(entry.tokens) * (main in has_copy)
            if len(has_copy) < len(own):
                break
        return num_tokens

    def stepped_down(self, blocks: Iterable[Block]) -> None:
        """Notes that ``blocks`` stepped down."""
        self._prefix.idle.file_settled(blocks)

    def filed(self, key: bytes) -> None:
        """Notes that blocks of a piece were cached."""
        if self.disk is not None:
            self.disk.filed(key)

    def write_ahead(self) -> None:
        """Copies blocks that are idle and can step down no more, those that are so for longest first.

        A turn of them while nothing runs. Then copies that are there go to the disk, and while nothing runs all idle
        blocks are copied for that.
        """
        if self._is_idle:
            self._nbytes_left, self._has_copied = IDLE_NBYTES, False
        self._write_settled()
        if self.disk is not None:
            self.disk.save()
            if self._is_idle:
                self.disk.copy_idle()

    @property
    def has_unwritten(self) -> bool:
        """Whether idle blocks may be left that ``write_ahead`` would copy."""
        return self._prefix.idle.next_settled() is not None

    def _write_settled(self) -> None:
        idle, tier = self._prefix.idle, self.tier
        while (block := idle.next_settled()) is not None:
            entry = self._prefix.entry_of(block)
            if entry is not None and not tier.keeps(entry.key, block.group, block.rung):
                if not self.may_copy(block.slot.nbytes):
                    return
                self.count(tier.write(entry.key, entry.parent, entry.tokens, block, entry.tenant))
            idle.pass_settled()

    def may_copy(self, nbytes: int) -> bool:
        """Whether so many bytes more may be copied beside the next step; the first ones always."""
        return not self._has_copied or nbytes <= self._nbytes_left

    def count(self, nbytes: int) -> None:
        """Notes that so many bytes are copied beside the next step."""
        self._has_copied |= nbytes > 0
        self._nbytes_left -= nbytes

    # ---- back

    def begin_fetching(self, request: Request) -> Fetching | None:
        """The pieces that a waiting request can use from the host, behind those that were fetched for it before.

        A piece is taken from KV memory where it can serve from there. None if the host has nothing that is missing, and
        the disk brings nothing.
        """
        prefix, tier, num_tokens = self._prefix, self.tier, request.num_tokens
        limits = prefix.rules.limits(num_tokens, request.floor)
        pieces, found = list[HostPiece | None](), list[list[Block | HostBlock | None]]()
        salt = request.params.cache_salt
        places = prefix.pieces(request.token_ids, salt, num_tokens - 1, request.pieces)
        for index, (key, _, tokens) in enumerate(places):
            piece, blocks = tier.find(key, tokens), prefix.cached(key, tokens)
            rungs = [narrowest if index < number else 0 for narrowest, number in limits]
            is_new = index >= request.num_fetched_pieces
            copies = [None] * len(rungs) if piece is None else piece.blocks
            found.append([self._choose(*each, is_new) for each in zip(blocks, copies, rungs, strict=True)])
            pieces.append(piece)
        number = len(prefix.rules.longest(found, num_tokens, request.floor))
        tier.touch([place.key for place in places[:number]])
        is_read = self.disk is not None and self.disk.read(request, places, found)
        return self._fetching(request, pieces[:number], found[:number], is_read)

    def _choose(
        self, block: Block | None, copy: HostBlock | None, narrowest: int, is_new: bool
    ) -> Block | HostBlock | None:
        """The cached ``block``, or else its copy if that can serve on the rung ``narrowest`` or above.

        No copy that was fetched before or whose values may still turn out bad, unless it is on its way.
        """
        if copy is None or copy.rung > narrowest or (block is not None and block.rung <= narrowest):
            return block
        return copy if self.tier.is_coming(copy) or (is_new and copy.source is None) else block

    def _fetching(
        self,
        request: Request,
        pieces: Sequence[HostPiece | None],
        found: Sequence[Sequence[Block | HostBlock | None]],
        is_coming: bool,
    ) -> Fetching | None:
        """What is missing of these pieces. ``is_coming``: the request waits for others in any case."""
        missing: dict[int, list[HostBlock]] = {}
        held = list[Block]()
        for group, in_sight in enumerate(self._prefix.rules.in_sight(len(pieces)) if pieces else ()):
            for index in in_sight:
                block = found[index][group]
                if isinstance(block, Block):
                    held.append(block)
                elif block is not None and self.tier.is_coming(block):
                    is_coming = True
                elif block is not None:
                    missing.setdefault(index, []).append(block)
        if not missing and not is_coming:
            return None
        needed = [Missing(i, piece, missing[i]) for i, piece in enumerate(pieces) if piece and i in missing]
        return Fetching(self._tables, self, request, needed, held, is_coming)

    # ---- taking out

    def purge(self, blocks: Collection[Block], entries: Iterable[Entry]) -> None:
        """Takes out the copies of ``blocks``, and of those of ``entries``, whose values are not trusted."""
        for key in [*(entry.key for entry in entries), *self.tier.distrust(blocks)]:
            self.tier.purge(key)
            if self.disk is not None:
                self.disk.forget(key)

    def clear(self) -> None:
        """Gives up all copies, and blocks that wait for their bytes."""
        for block in self.tier.clear():
            self._tables.store.drop(block)
