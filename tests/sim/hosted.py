"""The host tier reckoned again: what is kept, what leaves, what a waiting request fetches, and invariants of its books.

T1 every slot of host memory has one copy, T2 a piece is older than the one before it, T3 bytes add up. T4 (device) no
byte is read while it is copied, T5 who is given up leaves a copy as wide if there is room, T6 what is copied beside a
step stays within its bytes, T7 a piece is fetched once while a request waits, T8 copies have the bytes of their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .broken import require
from .disk import SLOW, Promised, Reads
from .host_shares import HostShares

if TYPE_CHECKING:
    from .spy import SpySpace


class Hosted:
    """Checks the calls of a space that concern its host tier; without one nothing happens."""

    def __init__(self, space: SpySpace, prefix: Any):
        self._space, self._real = space, space._space
        self.tier: Any = None if prefix is None or prefix.host is None else prefix.host.tier
        self.traffic: Any = None if self.tier is None else prefix.host.disk
        self.waits: dict[Any, int] = {}  # requests that had blocks fetched since they began to wait, and for how long
        self.under_way: set[Any] = set()  # those that wait for blocks in this step
        self._fetched: dict[Any, set[tuple[bytes, int]]] = {}  # what came for each while it waits
        self._offered: dict[Any, int] = {}  # idle blocks that could be written ahead, and since when they are idle
        self.reads: set[tuple[bytes, Any]] = set()  # pieces that were read for each while it waits
        self.sources: dict[Any, Any] = {}  # the block that each copy is of
        self._parents: dict[bytes, bytes] = {}  # of pieces, by key, when blocks left last
        self._budget: int | None = None
        self._dropped = 0  # bytes that host memory had given up when blocks left last
        self._had, self._tenants = set[bytes](), dict[bytes, str]()  # pieces then, and tenants of what left
        self._payers: dict[bytes, str] = {}  # those that its copies count for
        self._noted = 0  # bytes beside this step
        self._counts: Counter[str] = Counter()  # since the simulator looked
        self.shares = None if self.tier is None else HostShares(self)

    def take_counts(self) -> Counter[str]:
        """Blocks by what became of them since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    @property
    def quota(self) -> float | None:
        """Share of a tenant."""
        found: float | None = self._space.options.quota
        return found

    def count(self, what: str) -> None:
        """Counts an event."""
        self._counts[what] += 1

    # ---- steps

    def begin_step(self, copy_nbytes: int | None) -> None:
        running = set(self._space.scheduler.running)
        self.waits = {request: n for request, n in self.waits.items() if request not in running}
        self._fetched = {request: keys for request, keys in self._fetched.items() if request not in running}
        self.reads = {(key, request) for key, request in self.reads if request not in running}
        self._budget, self._noted = copy_nbytes, 0
        self.under_way.clear()
        if self.tier is None:
            self._real.begin_step(copy_nbytes)
            return
        landing = [fetch for fetch in self.tier._fetches.values() if fetch.command <= self.tier.num_commands]
        kept = [fetch for fetch in landing if self._copy(fetch.piece.key, fetch.copy.group) is fetch.copy]
        had = set(self._space.prefix._entries)
        wide = {(piece.key, copy.group): copy.rung for piece in self.tier._pieces.values() for copy in piece.held()}
        self._real.begin_step(copy_nbytes)
        for (key, group), rung in wide.items():
            copy = self._copy(key, group)
            require(copy is not None and copy.rung <= rung, "a copy gave way to a narrower one")
        readings = [] if self.traffic is None else self.traffic._readings
        require(not any(r.job is not None and r.job.is_over for r in readings), "a read that is over stays under way")
        require(not any(fetch.copy in self.tier._fetches for fetch in landing), "a block never lands")
        cached = self._space.cached.blocks()
        for fetch in landing:
            filed = cached.get((fetch.piece.key, fetch.copy.group))
            if fetch in kept:
                require(filed is not None and filed.rung <= fetch.block.rung, "a block that came is not filed")
                entry = self._space.prefix._entries[fetch.piece.key]
                is_right = fetch.piece.key in had or entry.tenant == fetch.piece.tenant
                require(is_right, "a piece that comes back counts for another tenant")
            else:
                require(filed is not fetch.block, "a block with the bytes of a copy that is gone is filed")
        require(not any(slot in self.tier._busy for slot in self._slots_taken()), "a slot stays busy")

    def _slots_taken(self) -> Iterable[Any]:
        return [slot for slot, command in self.tier._busy.items() if command <= self.tier.num_commands]

    def write_ahead(self) -> None:
        if self.tier is None:
            self._real.write_ahead()
            return
        idle = {block: since for block, since in self._idle_settled().items() if self._offered.get(block) != since}
        had, dropped, noted = dict(self.tier._writes), self.tier._moved["dropped"], self._noted
        self._real.write_ahead()
        new = [copy for copy in self.tier._writes if copy not in had]
        is_saving = self.traffic is not None and self._budget is None
        for copy in new:
            is_idle = copy.source.refs == 1 and (is_saving or copy.source in self._idle_settled())
            require(is_idle, "a block in use is written ahead")
            self.note_bytes(copy.slot.nbytes)
        self._counts["written"] += len(new)
        stopped = self._budget is not None and bool(new or noted)
        full = self.tier._moved["dropped"] > dropped
        entries = self._space.prefix._of_block
        for block, since in idle.items():
            kept = self.keeps(entries[block].key, block)
            if block not in self._space.prefix.idle._settled:
                self._offered[block] = since
            excused = kept or stopped or full or not self._has_place(block.slot.nbytes)
            require(excused, "an idle block is not written ahead")

    def _idle_settled(self) -> dict[Any, int]:
        entries, groups = self._space.prefix._entries, self._space.options.groups
        return {
            block: entry.since[index]
            for entry in entries.values()
            for index, block in enumerate(entry.blocks)
            if block is not None and block.refs == 1 and not 0 <= block.rung < len(groups[index].sizes) - 1
        }

    def note_bytes(self, nbytes: int) -> None:
        """Notes bytes that are copied beside this step."""
        within = self._budget is None or not self._noted or self._noted + nbytes <= self._budget
        require(within, "more is copied beside a step than may be")
        self._noted += nbytes

    # ---- out

    def watch_out(self, blocks: dict[tuple[bytes, int], Any]) -> dict[tuple[bytes, int], bool]:
        """Which of ``blocks``, which are to leave, have a copy as wide whose bytes are there, or on their way."""
        if self.tier is None:
            return {}
        self._dropped = self.tier._moved["dropped"]
        self._had = set(self.tier._pieces)
        self._tenants = {key: self._space.prefix._entries[key].tenant for key, _ in blocks}
        self._payers = {
            key: self.tier._pieces[key].tenant if key in self._had else self._tenants[key] for key, _ in blocks
        }
        filed = (*self._space.prefix._entries.values(), *self.tier._pieces.values())
        self._parents = {each.key: each.parent for each in filed}
        return {
            (key, group): self.keeps(key, block) and self._copy(key, group) not in self.tier._writes
            for (key, group), block in blocks.items()
        }

    def check_out(self, blocks: dict[tuple[bytes, int], Any], clean: dict[tuple[bytes, int], bool], had: int) -> None:
        """Checks that they left copies, as far as there is room; ``had``: copies noted before."""
        if self.tier is None:
            return
        # What was given up for one of several may have left room that was not there for another, or been its copy.
        is_excused = len(blocks) > 1 and self.tier._moved["dropped"] > self._dropped
        lost = {
            (key, group): block
            for (key, group), block in blocks.items()
            if not self.keeps(key, block) or self._copy(key, group) in self.tier._writes
        }
        keys = {key for key, _ in lost}
        for (key, _), block in lost.items():
            is_behind = keys & self._before(key) - {key}  # of no use without what is lost before
            is_lost = not (is_behind or is_excused) and self._could_keep(key, block)
            require(not is_lost, "a block is given up and leaves no copy")
        for key, tenant in self._tenants.items():
            piece = None if key in self._had else self.tier._pieces.get(key)
            require(piece is None or piece.tenant == tenant, "a copy counts for another tenant")
        new = self.num_noted() - had
        require(is_excused or new <= len(blocks) - sum(clean.values()), "a block that has a copy leaves another one")
        self._counts["out"] += new

    def num_noted(self) -> int:
        """Copies that leave with the next command's waves."""
        return 0 if self.tier is None else sum(map(len, self.tier._outs.values()))

    def _could_keep(self, key: bytes, block: Any) -> bool:
        """Whether room could be made for a copy: some piece can be given up that is not before its own."""
        if self._has_place(block.slot.nbytes):
            return True
        before, rank = self._before(key), self.tier.hints.rank
        over = self.shares.over()
        is_over = self._payers[key] in over  # then it takes no place of others
        return not self._never_fits(block.slot.nbytes) and any(
            piece.key not in before
            and not any(self.is_used(copy) for copy in piece.held())
            and rank(piece.key) <= max(1, rank(key))  # nobody else takes the place of what is retained
            and (not is_over or piece.tenant in over)
            for piece in self.tier._pieces.values()
        )

    def is_used(self, copy: Any) -> bool:
        """Whether a command under way, or the next one, names a copy."""
        return copy.slot in self.tier._busy or copy.slot in self.tier._held or copy in self.tier._writes

    def _has_place(self, nbytes: int) -> bool:
        """Whether there is a slot of that size without giving anything up."""
        arena = self.tier.arena
        if nbytes == arena.block_nbytes:
            return bool(arena._block_places.free) or arena._gap >= nbytes
        return bool(arena._partial.get(nbytes) or arena._slab_places.free) or arena._gap >= arena.slab_nbytes

    def _never_fits(self, nbytes: int) -> bool:
        arena = self.tier.arena
        return arena.nbytes < (nbytes if nbytes == arena.block_nbytes else arena.slab_nbytes)

    def _before(self, key: bytes) -> set[bytes]:
        """The keys of a piece and of those before it."""
        found = set[bytes]()
        while key not in found:
            found.add(key)
            key = self._parents.get(key, key)
        return found

    def keeps(self, key: bytes, block: Any) -> bool:
        """Whether there is a copy as wide as ``block``."""
        copy = self._copy(key, block.group)
        return copy is not None and copy.rung <= block.rung

    def _copy(self, key: bytes, group: int) -> Any:
        piece = self.tier._pieces.get(key)
        return None if piece is None else piece.blocks[group]

    def park(self, request: Any) -> int:
        had = self.num_noted()
        filed = (
            {}
            if self.tier is None
            else {
                (entry.key, block.group): block
                for block in self._space.holdings.blocks_of(request)
                if (entry := self._space.prefix._of_block.get(block)) is not None
            }
        )
        clean = self.watch_out(filed)
        parked = int(self._real.park(request))
        self.check_out(filed, clean, had)
        tokens = sum(
            len(self._space.prefix._entries[key].tokens)
            for (key, group), block in filed.items()
            if group == self.main and self.keeps(key, block)
        )
        # Those behind the first without a copy may have earlier ones, which are of no use.
        is_right = parked <= tokens or self.tier._moved["dropped"] > self._dropped
        require(is_right, f"{parked} tokens are told to be parked, {tokens} are")
        self._counts["parked"] += len(filed) > 0
        return parked

    @property
    def main(self) -> int:
        """The main group's index."""
        return int(self._space.tables.main.index)

    # ---- the disk

    def coming(self) -> list[Any]:
        """Copies that the disk is to bring, and nobody finds yet."""
        readings = [] if self.traffic is None else self.traffic._readings
        return [copy for reading in readings for copy in reading.piece.held()]

    def held(self) -> set[Any]:
        """Slots that the disk reads or writes."""
        writings = [] if self.traffic is None else self.traffic._writings
        return {copy.slot for copy in self.coming()}.union(*(writing.slots for writing in writings))

    # ---- back

    def begin_fetching(self, request: Any) -> Any:
        params = request.params
        if self.tier is None or params.prompt_logprobs is not None or params.num_prefill_tokens is not None:
            found = self._real.begin_fetching(request)
            require(found is None, "blocks are fetched for one who may not share any")
            return None
        expected, is_coming = self._expected(request)
        reads = Reads(self, request)
        found = self._real.begin_fetching(request)
        is_coming |= reads.check()
        missing = [] if found is None else [(m.piece.key, copy) for m in found._missing for copy in m.copies]
        require(missing == expected, f"{len(missing)} blocks are to be fetched, {len(expected)} are missing")
        waits = bool(expected or is_coming)
        require((found is not None) == waits, "a request waits for nothing, or not for what comes")
        require(found is None or found.is_under_way == is_coming, "it is unknown that blocks are coming")
        return None if found is None else Watched(self, found, request)

    def _expected(self, request: Any) -> tuple[list[tuple[bytes, Any]], bool]:
        """The copies that are missing, in order, and whether some are on their way."""
        found = self.longest(request, lambda number, key: {})
        copies = [each for each in found if hasattr(each[1], "source")]
        coming = [copy for _, copy in copies if copy in self.tier._fetches]
        return [each for each in copies if each[1] not in coming], bool(coming)

    def longest(self, request: Any, more: Callable[[int, bytes], Mapping[int, int]]) -> list[tuple[bytes, Any]]:
        """The longest prefix from KV memory, the host, and ``more``: rungs by group of a piece of a number and key."""
        cached, options = self._space.cached, self._space.options
        blocks, ends = cached.blocks(), cached.ends(request.num_tokens - 1)
        keys, floor = cached.keys(request, ends), options.floor(request.params)
        union: dict[tuple[bytes, int], Any] = {}
        for number, key in enumerate(keys):
            for index, group in enumerate(options.groups):
                most = group.floors[floor]
                if group.visible is None and number >= (options.sink > 0):
                    begins = group.end(group.blocks_for(request.num_tokens) - 2)
                    most = most if number - (options.sink > 0) < group.num_aged(begins) else 0
                own, copy = blocks.get((key, index)), self._copy(key, index)
                if copy is not None and copy.rung <= most and (own is None or own.rung > most):
                    fetched = (key, index) in self._fetched.get(request, ()) or number < request.num_fetched_pieces
                    if copy in self.tier._fetches or (copy.source is None and not fetched):
                        own = copy
                rung = more(number, key).get(index)
                if rung is not None and rung <= most and (own is None or own.rung > most):
                    own = Promised(rung)
                if own is not None:
                    union[key, index] = own
        for count in range(len(keys), 0, -1):
            served = [
                [union.get((keys[piece], index)) for piece in cached.pieces(group, ends[count - 1], count)]
                for index, group in enumerate(options.groups)
            ]
            if all(cached.serves(group, served[i], request, ends[count - 1]) for i, group in enumerate(options.groups)):
                places = [
                    (piece, index)
                    for index, group in enumerate(options.groups)
                    for piece in cached.pieces(group, ends[count - 1], count)
                ]
                return [(keys[piece], union[keys[piece], index]) for piece, index in sorted(places)]
        return []

    def fetched(self, request: Any, copies: list[tuple[bytes, Any]]) -> None:
        """Notes that a piece is fetched for ``request``."""
        self.note_bytes(sum(copy.slot.nbytes for _, copy in copies))
        had = self._fetched.setdefault(request, set())
        for key, copy in copies:
            require((key, copy.group) not in had, "a piece is fetched twice for one who waits")
            had.add((key, copy.group))
            require(copy.source is None, "a copy is fetched whose values may be bad")
        self._counts["fetched"] += len(copies)

    def ended(self, request: Any, is_under_way: bool) -> None:
        """Notes the end of a call for ``request``."""
        if is_under_way:
            self.under_way.add(request)
            self.waits[request] = self.waits.get(request, 0) + 1
            most = 3 * request.num_tokens // self._space.options.block + 6
            if self.traffic is not None:
                most = 8 * most + 8 * SLOW
            require(self.waits[request] <= most, "a request waits for blocks for ever")


class Watched:
    """A ``FetchLike`` whose calls are checked."""

    def __init__(self, hosted: Hosted, fetching: Any, request: Any):
        self._hosted, self._fetching, self._request = hosted, fetching, request
        self._space = hosted._space

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetching, name)

    def has_room(self, spare: int) -> bool:
        space, options = self._space, self._space.options
        lacking = [r for r in space.scheduler.running if space.holdings.lacks_block(r)]
        require(spare == len(lacking), f"{spare} blocks are spared, {len(lacking)} requests lack one")
        space._end_shrink()
        wanted = space.holdings.dense(1 + spare) + [copy.slot.nbytes for copy in self._fetching._missing[0].copies]
        for group in options.groups:
            wanted += group.slots[options.sink > 0 :]
        found = bool(self._fetching.has_room(spare))
        require(found == (space.memory.packed(wanted) <= space.memory.limit()), f"room for a piece: {found}")
        space.needy, space.wanted, space.short = self._request, wanted, not found
        name = f"{self._request.request_id} {len(self._fetching._missing)}"
        space.asked[name] = len(wanted)
        return found

    def fetch(self) -> bool:
        piece = self._fetching._missing[0]
        is_kept = all(self._hosted._copy(piece.piece.key, copy.group) is copy for copy in piece.copies)
        used, tables = self._space.tables.arena.used_nbytes, self._space.tables
        done = bool(self._fetching.fetch())
        require(done == is_kept, "a copy is fetched that is gone, or is not though it is there")
        if not done:
            return False
        won = tables.arena.used_nbytes - used
        require(won == sum(copy.slot.nbytes for copy in piece.copies), "a piece takes other bytes than it has")
        self._hosted.fetched(self._request, [(piece.piece.key, copy) for copy in piece.copies])
        return True

    def end(self) -> None:
        self._fetching.end()
        self._hosted.ended(self._request, self._fetching.is_under_way)
