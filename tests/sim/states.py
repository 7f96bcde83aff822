"""Checkpoints of states reckoned again: where requests leave them, on which they begin, and invariants of their books.

C1 a request stops at each border that is due, C2 it leaves a checkpoint there if it has room, or idle memory alone
makes some, C3 behind its prompt it keeps the newest alone, C4 a checkpoint goes no later than the last block of its
tokens, C5 the least recently used goes first, C6 nobody holds one between two steps. The device has C7 a state goes on
from the tokens before a step, of the same salt, C8 from the rung that it stands on. C9 it begins as wide as may be, on
its request's floor or above, C10 those of a checkpoint are the ones it was taken from, or have stepped down.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from qkv_engine.request import RequestStatus

from .broken import require
from .cached import CHECKPOINT

if TYPE_CHECKING:
    from .spy import SpySpace


class States:
    """Checks the calls of a space that concern checkpoints; without states nothing happens."""

    def __init__(self, space: SpySpace):
        self._space, self._real, self.options = space, space._space, space.options
        self._ends: dict[str, tuple[int, int]] = {}  # by request: where cached blocks end, and the last of its prompt
        self._counts: Counter[str] = Counter()  # since the simulator looked
        self._num_hits = 0
        self._before: Any = None  # what is cached and has stepped down when a checkpoint first asked for room

    @property
    def _checkpoints(self) -> Any:
        return None if self._space.prefix is None else self._space.prefix.checkpoints

    def take_counts(self) -> Counter[str]:
        """Checkpoints by what became of them since the last call."""
        if self._checkpoints is not None:
            self._counts["restored"] += self._checkpoints.num_hits - self._num_hits
            self._num_hits = self._checkpoints.num_hits
        counts, self._counts = self._counts, Counter()
        return counts

    def note_given_up(self, places: Iterable[tuple[bytes, int]]) -> None:
        """Counts checkpoints among places that were given up."""
        self._counts["given up"] += sum(group == CHECKPOINT for _, group in places)

    def left_by(self, request: Any) -> list[Any]:
        """Checkpoints that a running request left, and the one that it began on."""
        course = None if self._checkpoints is None else self._checkpoints._courses.get(request.request_id)
        return [] if course is None else [course.begun_on, *course.left]

    # ---- borders

    def note_start(self, request: Any) -> None:
        """Notes where a request that is about to begin has to leave checkpoints."""
        options, num_tokens = self.options, request.num_tokens
        shared, _ = self._space.cached.longest(request, with_states=False)
        blocks = (num_tokens - 1 - options.sink) // options.block
        last = options.sink + blocks * options.block if blocks > 0 else 0
        self._ends[request.request_id] = shared, last

    def check_start(self, request: Any, num_found: int) -> None:
        """Checks what a request that begins holds, and its first border."""
        held = {} if self._checkpoints is None else self._checkpoints.held
        require((request.request_id in held) == bool(num_found and self.options.num_states), "no checkpoint is held")
        if self.options.num_states:
            group, slots = self.options.groups[0], self.options.state_slots
            found = [group.slot_rung(slot) for slot in slots]
            if request.request_id in held:
                found = [block.rung for block in held[request.request_id].slots]
            require(self._begun(request) == found, "states begin on other rungs than they could")
        self._check_next(request, num_found)

    def _begun(self, request: Any) -> list[int]:
        """Rungs on which the states of a request begin."""
        table = self._space.holdings.tables_of(request)[0]
        return [table.slot_rungs[slot] for slot in self.options.state_slots]

    def _lower(self, request: Any) -> list[int]:
        """Those a rung lower, as far as the request allows."""
        group, floor = self.options.groups[0], self.options.floor(request.params)
        most, begun = group.state_floors[floor] if self.options.state_below else 0, self._begun(request)
        steps = [min(max(step, most), step + 1) for _, step in map(group.place, begun)]
        return [group.slot_rung(slot, step) for slot, step in zip(self.options.state_slots, steps, strict=True)]

    def begin_narrower(self, request: Any) -> bool:
        had, lower = self._begun(request), self._lower(request)
        require(request.status is RequestStatus.WAITING, "the states of a request that runs begin lower")
        self._space.check_stuck_start(request)
        done = bool(self._real.begin_narrower(request))
        require(self._begun(request) == lower and done == (lower != had), "states begin on other rungs than asked")
        self._counts["begun lower"] += done
        return done

    def check_narrowest(self, request: Any) -> None:
        """Checks that a request that could not start tried with states on its floor."""
        require(self._begun(request) == self._lower(request), "a request waits though narrower states might fit")

    def note_step(self, block: Any, is_idle: bool) -> None:
        """Counts a state that steps down."""
        if block.rung < 0:
            self._counts["checkpoint down" if is_idle else "state down"] += 1

    def _check_next(self, request: Any, num_computed: int) -> None:
        due = self._next(request, num_computed)
        require(request.next_checkpoint_at == due, f"{request.next_checkpoint_at} tokens to a border, not {due}")

    def _next(self, request: Any, num_computed: int) -> int:
        """The first border that is due behind so many tokens."""
        options, has_cache = self.options, self._space.prefix is not None
        if not (options.num_states and has_cache) or request.params.num_prefill_tokens is not None:
            return sys.maxsize
        (shared, last), block_nbytes = self._ends[request.request_id], sum(self._space.holdings.dense(1))
        every, number = max(1, -(-sum(options.state_sizes) // block_nbytes)), 1
        while True:
            border = options.sink + number * options.block
            is_due = num_computed >= last or border in (shared, last) or number % every == 0
            if border > num_computed and is_due:
                return border
            number += 1

    def check_batch(self, batch: Any) -> None:
        """Checks C1 and C6 of a batch."""
        for item in batch.items if self.options.num_states else ():
            require(item.end <= self._next(item.request, item.start), "a chunk goes on behind a border")
            self._check_next(item.request, item.start)
        require(self._checkpoints is None or not self._checkpoints.held, "a checkpoint is held after the start")

    # ---- calls

    def shortage_to_keep(self, request: Any) -> Any:
        space = self._space
        space._end_shrink()
        found = self._real.shortage_to_keep(request)
        wanted = self._wanted(request)
        self._before = self._before or self._now()
        lacks = bool(wanted) and space.memory.packed(wanted) > space.memory.limit()
        require((found is not None) == lacks, f"a checkpoint lacks room: {found is not None}, reckoned anew {lacks}")
        space.needy, space.wanted, space.short = request, wanted, lacks
        if lacks:  # beside the blocks that the request asks for
            space.asked[f"checkpoint of {request.request_id}"] = -(-sum(wanted) // sum(space.holdings.dense(1))) + 1
        return found

    def keep_state(self, request: Any) -> None:
        space, key, at = self._space, self._key(request), request.num_computed_tokens
        require(at == request.next_checkpoint_at, "a state is kept that is not due")
        before = len(space.cached.checkpoints())
        had, was_there = self._is_as_wide(request), key in space.cached.checkpoints()
        wanted, gone = self._wanted(request), [space._size_of(kind) for kind in space.cached.kinds().elements()]
        fits = not wanted or space.memory.packed(wanted, gone) <= space.memory.limit()
        yielded, steps = self._now() != self._before, self._now()[-1] - self._before[-1]
        require(fits or not yielded, "idle blocks yield to a checkpoint that finds no room even so")
        require(not steps, "blocks in use step down for a checkpoint")
        moved, self._before = None if had or wanted else self._newest(request).key, None
        self._real.keep_state(request)
        found = space.cached.checkpoints()
        require(
            (key in found) == (was_there or fits),
            "a state is not kept though there is room, or kept though there is none",
        )
        require(not fits or self._is_as_wide(request), "a checkpoint is kept though a wider one could be")
        self._counts["kept"] += len(found) - before
        self._counts["moved along"] += moved is not None
        ends = space.cached.ends(at)
        prompt = [
            key for key, end in zip(space.cached.keys(request, ends), ends, strict=True) if end <= self._last(request)
        ]
        require(moved not in prompt, "a checkpoint of a prompt is gone with its request")
        behind = [c for c in self.left_by(request)[1:] if self._is_kept(c) and c is self._newest(request)]
        require(len(behind) <= 1, "a request keeps more than its newest checkpoint behind its prompt")
        self._check_next(request, at)

    def _wanted(self, request: Any) -> list[int]:
        """Bytes of the slots that a checkpoint takes, none where there is one, or one that it takes the place of."""
        newest, rungs = self._newest(request), self._rungs(request)
        is_behind = request.num_computed_tokens > self._last(request)
        along = is_behind and newest is not None and self._is_kept(newest) and [s.rung for s in newest.slots] == rungs
        return [] if along or self._is_as_wide(request) else [self.options.groups[0].size(rung) for rung in rungs]

    def _rungs(self, request: Any) -> list[int]:
        """Rungs of the states of a request."""
        place, slots = self.options.groups[0].place, self._space.holdings.tables_of(request)[0].slots
        return [slot.rung for slot in slots if place(slot.rung)[0] in self.options.state_slots]

    def _is_as_wide(self, request: Any) -> bool:
        """Whether there is a checkpoint at which a request stands that is as wide as its states."""
        found = self._space.cached.checkpoints().get(self._key(request))
        if found is None:
            return False
        return all(slot.rung <= rung for slot, rung in zip(found.slots, self._rungs(request), strict=True))

    def _now(self) -> tuple[Any, int, int]:
        """What is cached, and how many idle blocks and others have stepped down."""
        space = self._space
        return set(space.cached.places()), space.replayed_idle.total(), space.replayed.total()

    def _last(self, request: Any) -> int:
        return self._ends[request.request_id][1]

    def _newest(self, request: Any) -> Any:
        return self._checkpoints._courses[request.request_id].newest

    def _is_kept(self, checkpoint: Any) -> bool:
        return self._space.cached.checkpoints().get(checkpoint.key) is checkpoint

    def _key(self, request: Any) -> bytes:
        """The key of all pieces that a request has computed, reckoned from its first token."""
        require(len(request.token_ids) >= request.num_computed_tokens, "a state is of tokens that nobody knows")
        return self._space.cached.keys(request, self._space.cached.ends(request.num_computed_tokens))[-1]


def check_checkpoints(space: SpySpace) -> Collection[Any]:
    """Checks the books of checkpoints; returns their slots."""
    found, options, slots = space.cached.checkpoints(), space.options, list[Any]()
    if space.prefix is None:
        return slots
    books = space.prefix.checkpoints
    require(not found or options.num_states > 0, "there are checkpoints of nothing")
    require([c.key for c in found.values()] == list(found), "a checkpoint is filed under another key")
    ages = [checkpoint.since for checkpoint in found.values()]
    require(ages == sorted(set(ages)), "checkpoints are not in the order of their use")
    running = {request.request_id for request in space.scheduler.running} if space.scheduler else set()
    require(books._courses.keys() <= running, "checkpoints of who is gone are remembered")
    left = {id(each) for course in books._courses.values() for each in course.left}
    entries = space.prefix._entries
    for checkpoint in found.values():
        require(
            checkpoint.key in entries or id(checkpoint) in left, "a checkpoint is kept without the blocks before it"
        )
        place = options.groups[0].place
        require([place(slot.rung)[0] for slot in checkpoint.slots] == options.state_slots, "a checkpoint lacks a state")
        slots += checkpoint.slots
    require(books.nbytes == sum(slot.slot.nbytes for slot in slots), "bytes of checkpoints are miscounted")
    return slots
