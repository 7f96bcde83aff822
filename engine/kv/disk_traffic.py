"""What moves between host memory and disk: pieces that are saved, and those that a waiting request lacks. No torch.

Copies in host memory are written once their bytes are there and known to be good. While nothing runs, cached blocks are
copied to the host for that, whether they could step down or not. Nobody waits for a write, and for a read only who
waits to be started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..request import PromptPiece, Request
from .arena import Slot
from .block import Standing
from .disk import Disk, DiskJob, DiskStats
from .host_piece import HostPiece
from .host_tier import HostTier

if TYPE_CHECKING:
    from .prefix import PrefixCache

IDLE_NBYTES = 2**27  # copied to the host in one turn while nothing runs: a request that comes waits for no more
MOST_SAVED = 64  # pieces that one step looks at


class OnDisk(NamedTuple):
    """What could be read of a block."""

    rung: int


class _Reading:
    """A piece that is to be read for ``request``, once copies of commands up to ``command`` are over."""

    def __init__(self, piece: HostPiece, request: Request, command: int):
        self.piece, self.request, self.command = piece, request, command
        self.job: DiskJob | None = None

    @property
    def is_under_way(self) -> bool:
        return self.job is not None and not self.job.is_over

    @property
    def is_overdue(self) -> bool:
        return self.job is not None and self.job.is_overdue


class _Writing(NamedTuple):
    """A piece that is being written, from these slots."""

    key: bytes
    slots: Sequence[Slot]
    job: DiskJob


class DiskTraffic:
    """Has ``disk`` write what ``tier`` keeps, and read what is asked for; owned by ``HostTraffic``."""

    def __init__(self, prefix: PrefixCache, tier: HostTier, disk: Disk):
        self.disk = disk
        self._prefix, self._tier = prefix, tier
        self._unsaved: dict[bytes, None] = {}
        tier.unsaved = self._unsaved
        self._filed: dict[bytes, None] = {}  # keys of cached pieces that have not been copied while nothing runs
        self._readings: list[_Reading] = []
        self._writings: list[_Writing] = []
        self.reset_counters()

    def reset_counters(self) -> None:
        """Counts anew."""
        self._counts: Counter[str] = Counter()

    def stats(self) -> DiskStats:
        """What has moved since the counters were reset."""
        return DiskStats(self._counts["tokens"], self._counts["lost"], self._counts["failed"])

    @property
    def has_unsaved(self) -> bool:
        """Whether there is anything to write that has not been handed to the disk."""
        return self.disk.can_write and bool(self._unsaved or self._filed)

    @property
    def is_reading(self) -> bool:
        """Whether somebody waits for a piece that is to be read."""
        return any(not reading.is_overdue for reading in self._readings)

    def wait(self, seconds: float) -> bool:
        """Waits for the disk, at most so long; ``False`` if all who wait for pieces lack some that are being read.

        What has come for them is taken in from time to time, too, while the rest is read.
        """
        is_due = self.disk.wait(seconds)
        lacking = set[Request]()
        for reading in reversed(self._readings):  # the last to end: one is enough
            if reading.request not in lacking and reading.is_under_way:
                lacking.add(reading.request)
        return is_due or not lacking or any(each.job is None or each.request not in lacking for each in self._readings)

    def begin_step(self) -> None:
        """Notes what the disk has done since the last step, and begins what had to wait for copies."""
        for writing in [writing for writing in self._writings if writing.job.is_over]:
            self._writings.remove(writing)
            self._tier.let_go(writing.slots)
        for reading in list(self._readings):
            is_asked = self._tier.coming(reading.piece.key) is reading.piece
            if reading.job is None and not is_asked:
                self._land(reading, False)
            elif reading.job is None and self._tier.num_ended >= reading.command:
                reading.job = self.disk.read(reading.piece)
            elif reading.job is not None and reading.job.is_over:
                self._land(reading, reading.job.has_come)

    def _land(self, reading: _Reading, is_good: bool) -> None:
        self._readings.remove(reading)
        if self._tier.land(reading.piece, is_good):
            self._counts["tokens"] += len(reading.piece.tokens)
            reading.request.num_stored_tokens += len(reading.piece.tokens)
        self._counts["failed"] += not is_good

    # ---- reading

    def read(self, request: Request, places: Sequence[PromptPiece], found: Sequence[Sequence[Standing | None]]) -> bool:
        """Has pieces read that a waiting request lacks; whether some are on their way that it can use.

        ``found``: by place what it can use already, by group. A piece is read once while it waits.
        """
        limits = self._prefix.rules.limits(request.num_tokens, request.floor)
        is_late = any(reading.is_overdue for reading in self._readings)
        with_disk = self._with_disk(request, places, found, limits, is_late)
        number = len(self._prefix.rules.longest(with_disk, request.num_tokens, request.floor))
        if not number:
            return False
        wanted = sorted(
            {
                index
                for group, in_sight in enumerate(self._prefix.rules.in_sight(number))
                for index in in_sight
                if not _serves(found[index][group], self._most(limits[group], index))
            }
        )
        is_coming = False
        for index in wanted:
            if self._tier.coming(places[index].key) is None and not self._begin(request, places[index]):
                break
            is_coming = True
        request.num_read_pieces = max(request.num_read_pieces, number)
        return is_coming

    def _with_disk(
        self,
        request: Request,
        places: Sequence[PromptPiece],
        found: Sequence[Sequence[Standing | None]],
        limits: Sequence[tuple[int, int]],
        is_late: bool,
    ) -> Iterator[Sequence[Standing | None]]:
        """What the request could use of each place, by group, with what comes or could be read."""
        for index, (place, blocks) in enumerate(zip(places, found, strict=True)):
            most = [self._most(limit, index) for limit in limits]
            if all(map(_serves, blocks, most)):
                yield blocks
                continue
            rungs: Mapping[int, int] = {}
            coming = self._tier.coming(place.key)
            if coming is not None and not is_late:
                rungs = {copy.group: copy.rung for copy in coming.held()}
            elif coming is None and not is_late and index >= request.num_read_pieces:
                rungs = self.disk.rungs(place.key)
            yield [
                OnDisk(rungs[group]) if group in rungs and not _serves(block, most[group]) else block
                for group, block in enumerate(blocks)
            ]

    @staticmethod
    def _most(limit: tuple[int, int], index: int) -> int:
        """The narrowest rung that serves in place ``index``, of ``PrefixCache.limits`` of a group."""
        narrowest, number = limit
        return narrowest if index < number else 0

    def _begin(self, request: Request, place: PromptPiece) -> bool:
        """Has a piece read that the disk has; whether there is room for it."""
        rungs = self.disk.rungs(place.key)
        given = *place, rungs, request.params.tenant
        piece = self._tier.receive(*given) if rungs else None
        if piece is not None:
            self._readings.append(_Reading(piece, request, self._tier.num_commands))
        return piece is not None

    # ---- writing

    def filed(self, key: bytes) -> None:
        """Notes that blocks of a piece were cached."""
        self._filed[key] = None

    def save(self) -> None:
        """Has the disk write pieces of host memory whose bytes are there, in the order of their coming."""
        if not self.disk.can_write:
            self._unsaved.clear()
            self._filed.clear()
        being_written = {writing.key for writing in self._writings}
        for key in list(islice(self._unsaved, MOST_SAVED)):
            piece = self._tier.piece(key)
            if key in being_written:  # what came since waits for its turn
                continue
            if piece is None:
                self._counts["lost"] += 1
            elif not all(map(self._tier.is_there, piece.held())):
                return
            elif self.disk.lacks(key, {copy.group: copy.rung for copy in piece.held()}):
                slots = [copy.slot for copy in piece.held()]
                if not self.disk.has_room(sum(slot.nbytes for slot in slots)):
                    return
                self._tier.hold(slots)
                self._writings.append(_Writing(key, slots, self.disk.write(piece)))
            del self._unsaved[key]

    def copy_idle(self) -> None:
        """Has cached blocks copied to the host that the disk lacks, while nothing runs; first come first.

        What the host has goes to the disk before that, and where it has no room what is being written.
        """
        nbytes = IDLE_NBYTES if self._unsaved else 0
        while self._filed and nbytes < IDLE_NBYTES:
            key = next(iter(self._filed))
            more = self._copy(key)
            if more is None and self._writings:
                return
            self._counts["lost"] += more is None
            nbytes += more or 0
            del self._filed[key]

    def _copy(self, key: bytes) -> int | None:
        """Copies the idle blocks of a piece beside the next step; their bytes, None if some find no room."""
        entry, tier, nbytes = self._prefix.entry(key), self._tier, 0
        blocks = [] if entry is None else [block for block in entry.blocks if block is not None and block.refs == 1]
        if entry is None or not blocks or not self.disk.lacks(key, {block.group: block.rung for block in blocks}):
            return 0
        for block in blocks:
            if not tier.keeps(key, block.group, block.rung):
                won = tier.write(key, entry.parent, entry.tokens, block, entry.tenant)
                if not won:
                    return None
                nbytes += won
        return nbytes

    # ---- taking out

    def forget(self, key: bytes) -> None:
        """Has the piece of ``key`` found no more anywhere, whose values are not trusted."""
        self._unsaved.pop(key, None)
        self._filed.pop(key, None)
        self.disk.forget(key)


def _serves(block: Standing | None, narrowest: int) -> bool:
    """Whether there is a block, on that rung or above."""
    return block is not None and block.rung <= narrowest
