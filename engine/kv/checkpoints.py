"""Checkpoints: copies of requests' states at borders of blocks, from which later requests may go on. No torch.

A checkpoint belongs to the tokens of a key of the prefix cache, as the blocks that end there do, and has slots like
those of a request's states, on the rungs that these stood on. No request holds one: it is copied to a request's own
states, which live on from there. Its slots step down before those of requests do.
Copies stand in the waves of the next command, so between the step under way and the one to come.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .block import Block
from .borders import Borders
from .hints import Hints
from .table import BlockTables


@dataclass(slots=True, eq=False)
class StateCheckpoint:
    """The states after the tokens of ``key``, in ``slots`` in the order of the layers.

    ``since``: serial number of its last use, in the order of those of idle blocks.
    """

    key: bytes
    slots: list[Block]
    since: int

    @property
    def is_held(self) -> bool:
        """Whether a request is about to begin on it."""
        return self.slots[0].refs > 1

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return sum(block.slot.nbytes for block in self.slots)

    def is_as_wide(self, states: Sequence[Block]) -> bool:
        """Whether no slot is narrower than the state of its layer."""
        return all(block.rung <= state.rung for block, state in zip(self.slots, states, strict=True))


@dataclass(slots=True, eq=False)
class _Course:
    """What a request has to do with checkpoints: where it leaves some, and those that it began on and ``left``.

    ``newest``: the one that it left behind its ``borders.last``, which goes along with it.
    """

    borders: Borders
    begun_on: StateCheckpoint | None
    left: list[StateCheckpoint] = field(default_factory=list)
    newest: StateCheckpoint | None = None


class Checkpoints:
    """The checkpoints of a prefix cache by key, the least recently used first; none for layers without states.

    ``serials``: those of idle blocks. ``hints``: of how long pieces, and the checkpoints behind them, are of use.
    """

    def __init__(self, tables: BlockTables, serials: Iterator[int], hints: Hints):
        self._tables, self._serials, self._hints = tables, serials, hints
        self.is_needed = tables.spec.has_states
        self._group = next((group for group in tables.groups if group.spec.num_states), tables.main)
        slots = self._group.spec.slots
        nbytes, block_nbytes = (
            sum(slot.nbytes for slot in slots if slot.is_state),
            sum(group.widest.nbytes for group in tables.spec.groups),
        )
        self.every = max(1, -(-nbytes // block_nbytes))  # blocks: those between two take as many bytes as one
        self._found: OrderedDict[bytes, StateCheckpoint] = OrderedDict()
        self._courses: dict[str, _Course] = {}
        self.held: dict[str, StateCheckpoint] = {}  # by the request that is about to begin on it
        self.reset_counters()

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._found)

    def __getitem__(self, key: bytes) -> StateCheckpoint:
        return self._found[key]

    def reset_counters(self) -> None:
        """Counts checkpoints that are taken and that requests begin on anew."""
        self.num_taken = self.num_hits = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(checkpoint.nbytes for checkpoint in self._found.values())

    def kinds(self) -> Counter[tuple[int, int]]:
        """Numbers by group and rung of the slots that can be given up."""
        kinds, index = Counter[tuple[int, int]](), self._group.index
        free = (checkpoint for checkpoint in self._found.values() if not checkpoint.is_held)
        equal = Counter(tuple([block.rung for block in checkpoint.slots]) for checkpoint in free)
        for rungs, number in equal.items():  # of many checkpoints all have the same
            for rung in rungs:
                kinds[index, rung] += number
        return kinds

    def serves(self, key: bytes, floor: int) -> bool:
        """Whether there is a checkpoint of ``key``, wide enough for a request whose ``floor`` is one of the ladder."""
        checkpoint, spec = self._found.get(key), self._group.spec
        if checkpoint is None:
            return False
        floors = spec.slot_floors(floor)[spec.num_token_slots :]
        return all(block.rung <= narrowest for block, narrowest in zip(checkpoint.slots, floors, strict=False))

    def coldest(self, number: int) -> list[tuple[int, int, Block]]:
        """The first ``number`` slots to step down, with their steps so far and ages; see ``IdleBlocks.coldest``."""
        return list(islice(self._unsettled(), number))

    def _unsettled(self) -> Iterator[tuple[int, int, Block]]:
        spec = self._group.spec
        for step in range(spec.state_floors[-1] if spec.state_floors else 0):
            for checkpoint in self._found.values():
                for block in () if checkpoint.is_held else checkpoint.slots:
                    if spec.step_of(block.rung) == step:
                        yield step, checkpoint.since, block

    # ---- of one request

    def begin(self, request_id: str, num_tokens: int, num_cached: int, checkpoint: StateCheckpoint | None) -> Borders:
        """Notes that a request of ``num_tokens`` begins, on ``checkpoint`` if that is given, which is held.

        The blocks of its first ``num_cached`` tokens are cached. Returns the borders at which it leaves checkpoints.
        """
        borders = Borders.of(self._tables.spec.main, self.every, num_tokens, num_cached)
        self._courses[request_id] = _Course(borders, checkpoint)
        if checkpoint is not None:
            self.held[request_id] = checkpoint
            self._group.begin_states(request_id, [slot.rung for slot in checkpoint.slots])
            for slot in checkpoint.slots:
                slot.refs += 1
        return borders

    def after(self, request_id: str, num_computed: int) -> int:
        """The next border of a request, more than ``num_computed`` tokens."""
        return self._courses[request_id].borders.after(num_computed)

    def restore(self, request_id: str) -> None:
        """Has the states of a request, which it has got now, filled from the checkpoint that is held for it."""
        checkpoint = self.held.get(request_id)
        if checkpoint is not None:
            self._tables.store.copy(checkpoint.slots, self._group.states(request_id))
            self.let_go(request_id)
            self.num_hits += 1
            if self._is_kept(checkpoint):
                self._use(checkpoint)

    def let_go(self, request_id: str) -> None:
        """Ends the hold on the checkpoint on which a request was about to begin."""
        checkpoint = self.held.pop(request_id, None)
        if checkpoint is not None:
            for slot in checkpoint.slots:
                self._tables.store.drop(slot)

    def wanted(self, request_id: str, key: bytes, num_tokens: int) -> Mapping[int, int]:
        """Slots by size that a checkpoint of a request with ``num_tokens`` takes beside those that there are."""
        states = self._group.states(request_id)
        if self._has_as_wide(key, states) or self._moves_along(request_id, num_tokens):
            return {}
        return Counter(state.slot.nbytes for state in states)

    def take(self, request_id: str, key: bytes, num_tokens: int) -> None:
        """Has the states of a request copied, which has computed the ``num_tokens`` of ``key``; there must be room.

        Behind its prompt they take the place of those that it left at the border before. They take the place of a
        checkpoint of ``key`` that is narrower.
        """
        course, states = self._courses[request_id], self._group.states(request_id)
        if self._has_as_wide(key, states):
            self._use(self._found[key])
            return
        checkpoint = self._moves_along(request_id, num_tokens)
        self.lose(key)
        if checkpoint is not None:
            del self._found[checkpoint.key]
            checkpoint.key = key
        else:
            checkpoint = self._new(key, states)
            course.left.append(checkpoint)
            if num_tokens > course.borders.last:
                if course.newest is not None and self._is_kept(course.newest):
                    self.remove(course.newest)  # on other rungs
                course.newest = checkpoint
        self._found[key] = checkpoint
        self._use(checkpoint)
        self._tables.store.copy(states, checkpoint.slots)
        self.num_taken += 1

    def _new(self, key: bytes, states: Sequence[Block]) -> StateCheckpoint:
        """A checkpoint on the rungs of ``states``."""
        store = self._tables.store
        return StateCheckpoint(key, [store.new_idle_block(self._group, state.rung) for state in states], 0)

    def _has_as_wide(self, key: bytes, states: Sequence[Block]) -> bool:
        """Whether there is a checkpoint of ``key`` that is worth as much as one of ``states``."""
        return key in self._found and self._found[key].is_as_wide(states)

    def _moves_along(self, request_id: str, num_tokens: int) -> StateCheckpoint | None:
        """The checkpoint of a request that its next one, at ``num_tokens``, takes the place of, slot by slot."""
        course, states = self._courses[request_id], self._group.states(request_id)
        newest = course.newest if num_tokens > course.borders.last else None
        if newest is None or not self._is_kept(newest):
            return None
        return newest if [slot.rung for slot in newest.slots] == [state.rung for state in states] else None

    def end(self, request_id: str, filed: Collection[bytes]) -> None:
        """Notes that a request runs no more: what it left behind blocks that are ``filed`` counts as used now."""
        self.let_go(request_id)
        course = self._courses.pop(request_id, None)
        for checkpoint in filter(self._is_kept, course.left if course else ()):
            if checkpoint.key in filed:
                self._use(checkpoint)
            else:
                self.remove(checkpoint)

    def distrust(self, request_id: str) -> None:
        """Takes out what a request, whose values are not trusted, began on and left."""
        course = self._courses.get(request_id)
        for checkpoint in () if course is None else (course.begun_on, *course.left):
            if checkpoint is not None and self._is_kept(checkpoint):
                self.remove(checkpoint)

    # ---- giving up

    def oldest(self) -> StateCheckpoint | None:
        """Of those on which no request is about to begin the first to make room: by its hints, then its last use."""
        free = (checkpoint for checkpoint in self._found.values() if not checkpoint.is_held)
        if not self._hints.has_ranks:
            return next(free, None)
        return min(free, key=lambda checkpoint: self._hints.rank(checkpoint.key), default=None)

    def remove(self, checkpoint: StateCheckpoint) -> None:
        """Takes a checkpoint out."""
        del self._found[checkpoint.key]
        for slot in checkpoint.slots:
            self._tables.store.drop(slot)

    def lose(self, key: bytes) -> None:
        """Takes the checkpoint of ``key`` out, if there is one."""
        if key in self._found:
            self.remove(self._found[key])

    def clear(self) -> None:
        """Takes all checkpoints out."""
        for checkpoint in list(self._found.values()):
            self.remove(checkpoint)

    def _is_kept(self, checkpoint: StateCheckpoint) -> bool:
        return self._found.get(checkpoint.key) is checkpoint

    def _use(self, checkpoint: StateCheckpoint) -> None:
        checkpoint.since = next(self._serials)
        self._found.move_to_end(checkpoint.key)
