"""The disk of a simulation: pieces by key, written and read at random moments, some of them never, late or torn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .broken import require
from .device import Record

if TYPE_CHECKING:
    from .hosted import Hosted
    from .simulator import Simulation


@dataclass(eq=False)
class Stored:
    """A piece on the disk: its tokens, and what the copies held, by group, with the blocks that they were of."""

    tokens: Any
    records: dict[int, Record]
    rungs: dict[int, int]
    sources: dict[int, Any]


@dataclass(eq=False)
class Job:
    """A piece on its way; what its slots hold must stay as it is, or is anything, until it is over."""

    piece: Any
    copies: list[Any]
    is_read: bool
    delay: int
    before: dict[int, Record] = field(default_factory=dict)  # of a piece that is written, by group
    stored: Stored | None = None
    fails: bool = False
    is_over: bool = False
    has_come: bool = False
    is_forgotten: bool = False
    age: int = 0

    @property
    def is_overdue(self) -> bool:
        return not self.is_over and self.age > SLOW

    def spans(self) -> list[tuple[int, int]]:
        return [(copy.slot.address, copy.slot.address + copy.slot.nbytes) for copy in self.copies]


SLOW = 12  # polls after which nobody waits for a read
MOST_WAITING = 6  # writes


class FakeDisk:
    """Outlives the books of its simulation, as files do."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.rng = random.Random(f"disk {simulation.options.seed}")
        self.pieces: dict[bytes, Stored] = {}
        self.jobs: list[Job] = []
        self.forgotten: dict[bytes, int] = {}  # keys, with the number of records written then
        self.can_write = True

    @property
    def _faults(self) -> float:
        return self.simulation.options.disk_faults

    def rungs(self, key: bytes) -> Mapping[int, int]:
        stored = self.pieces.get(key)
        return {} if stored is None else stored.rungs

    def lacks(self, key: bytes, rungs: Mapping[int, int]) -> bool:
        mine = self.rungs(key)
        return dict(rungs) != mine and all(group in rungs and rungs[group] <= rung for group, rung in mine.items())

    def has_room(self, nbytes: int) -> bool:
        return sum(not job.is_read for job in self.jobs) < MOST_WAITING

    def write(self, piece: Any) -> Job:
        require(self.can_write, "pieces are offered to a disk that takes none")
        job = self._job(piece, False)
        job.before = {copy.group: self._at(copy) for copy in job.copies}
        for copy in job.copies:
            record = job.before[copy.group]
            require(copy.source is None, "a copy is written whose values may be bad")
            require(record.path[-1] == copy.rung and record.count == len(piece.tokens), "half a copy is written")
        self.simulation.counts["saved"] += 1
        return job

    def read(self, piece: Any) -> Job:
        job = self._job(piece, True)
        job.stored = self.pieces.get(piece.key)
        job.fails = self.rng.random() < self._faults or job.stored is None
        if job.stored is not None:
            require(list(job.stored.tokens) == list(piece.tokens), "a piece of other tokens is read")
            job.fails |= any(job.stored.rungs.get(copy.group) != copy.rung for copy in job.copies)
        return job

    def forget(self, key: bytes) -> None:
        self.pieces.pop(key, None)
        for job in self.jobs:
            if job.piece.key == key:
                job.is_forgotten = True

    def let_age(self, key: bytes) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        self.poll()
        return True

    # ---- time

    def poll(self) -> None:
        """Some of what is under way goes on."""
        for job in list(self.jobs):
            job.age += 1
            if job.age > job.delay:
                self._end(job)

    def settle(self) -> bool:
        """Ends all jobs, as new books begin; whether host memory may be used again."""
        for job in list(self.jobs):
            self._end(job)
        return True

    def _job(self, piece: Any, is_read: bool) -> Job:
        delay = self.rng.choice((0, 0, 1, 3)) if self.rng.random() > self._faults else self.rng.randrange(3 * SLOW)
        copies = list(piece.held())
        job = Job(piece, copies, is_read, delay)
        host = self.simulation.device.host
        require(bool(copies), "a piece without copies goes to the disk, or comes from there")
        for copy in copies:
            require(copy.slot.alive, "a copy has no place while the disk uses it")
            is_used = host.is_used(copy.slot.address, copy.slot.nbytes, by_reads=is_read)
            require(not is_used, "the disk uses bytes that are being copied")
        for other in self.jobs:
            if is_read or other.is_read:
                apart = all(a[1] <= b[0] or b[1] <= a[0] for a in job.spans() for b in other.spans())
                require(apart, "the disk uses bytes twice")
        if is_read:
            for copy in copies:  # torn bytes, until all are there
                host._put(copy.slot.address, Record(copy.slot.nbytes, (), spoilt=True))
        self.jobs.append(job)
        return job

    def _end(self, job: Job) -> None:
        self.jobs.remove(job)
        job.is_over = True
        host, is_lost = self.simulation.device.host, self.rng.random() < self._faults
        if job.is_read:
            for copy in job.copies:
                require(not self._at(copy).path, "bytes are written where the disk reads to")
                if job.stored is not None and not job.fails:
                    host._put(copy.slot.address, replace(job.stored.records[copy.group]))
                sources = {} if job.stored is None else job.stored.sources
                self.simulation.space.hosted.sources[copy] = sources.get(copy.group)
            job.has_come = not job.fails
            self.simulation.counts["read"] += job.has_come
            self.simulation.counts["torn"] += job.fails
            if job.fails and self.rng.random() < 0.5:
                self.pieces.pop(job.piece.key, None)  # the store forgets what it cannot read, if it is not the system
            return
        for copy in job.copies:
            require(self._at(copy) is job.before[copy.group], "bytes change while they are written")
        rungs = {copy.group: copy.rung for copy in job.copies}
        if not (is_lost or job.is_forgotten) and self.lacks(job.piece.key, rungs):
            sources = {copy.group: self.simulation.space.hosted.sources[copy] for copy in job.copies}
            records = {group: replace(record) for group, record in job.before.items()}
            self.pieces[job.piece.key] = Stored(job.piece.tokens, records, rungs, sources)

    def _at(self, copy: Any) -> Record:
        return self.simulation.device.host._at(copy.slot.address, copy.slot.nbytes)


def bad_sources(disk: FakeDisk | None) -> set[Any]:
    """Blocks whose bad values are stored, which nobody knows."""
    pieces = [] if disk is None else disk.pieces.values()
    return {piece.sources[group] for piece in pieces for group, record in piece.records.items() if record.spoilt}


def check_disk(simulation: Simulation) -> None:
    """Checks that what could be read holds no values known to be bad, and that jobs have their places."""
    disk, model = simulation.disk, simulation.model
    if disk is None:
        return
    doubtful = model.unknown.union(*(simulation.blocks_of(request) for request in model.tainted))
    for stored in disk.pieces.values():
        for group, record in stored.records.items():
            require(not record.spoilt or stored.sources[group] in doubtful, "bad values are stored")
    for job in disk.jobs:
        require(all(copy.slot.alive for copy in job.copies), "a place is freed while the disk uses it")


class Promised(NamedTuple):
    """What the disk could bring of a block."""

    rung: int


class Reads:
    """What a waiting request should have read, reckoned before its call and compared after it."""

    def __init__(self, hosted: Hosted, request: Any):
        self._hosted, self._request, self._traffic = hosted, request, hosted.traffic
        if self._traffic is None:
            return
        self._had = {reading.piece.key for reading in self._traffic._readings}
        self._is_late = any(reading.job is not None and reading.job.is_overdue for reading in self._traffic._readings)
        found = [] if self._is_late else hosted.longest(request, self._more)
        self._wanted = list(dict.fromkeys(key for key, block in found if isinstance(block, Promised)))

    def _more(self, number: int, key: bytes) -> Mapping[int, int]:
        coming = self._hosted.tier._coming.get(key)
        if coming is not None:
            return {copy.group: copy.rung for copy in coming.held()}
        return self._traffic.disk.rungs(key) if number >= self._request.num_read_pieces else {}

    def check(self) -> bool:
        """Whether the request waits for the disk, now that it was looked at."""
        if self._traffic is None:
            return False
        now = {reading.piece.key: reading for reading in self._traffic._readings}
        coming = [key for key in self._wanted if self._hosted.tier._coming.get(key) is not None]
        # Those that came for others before may lie behind one for which there is no room now.
        last = max((self._wanted.index(key) + 1 for key in coming if key not in self._had), default=0)
        require(coming[:last] == self._wanted[:last], "pieces are read out of order")
        require(now.keys() - self._had <= set(coming), "a piece is read that nobody lacks")
        for key in coming:
            if key not in self._had:
                require((key, self._request) not in self._hosted.reads, "a piece is read twice for one who waits")
                self._hosted.reads.add((key, self._request))
                require(now[key].request is self._request, "a piece is read for another one")
                tenant = self._request.params.tenant
                require(now[key].piece.tenant == tenant, "a piece that is read counts for another tenant")
        has_first = bool(coming) and coming[0] == self._wanted[0]
        if self._wanted and not has_first:
            self._hosted.count("no room")
        return has_first
