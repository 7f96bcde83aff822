"""Sizes of KV memory as plain numbers: all that the books and the scheduler know of formats and models. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..layer_kv import MAX_GROUPS
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

    ``num_tokens``: the request's first tokens that the slot holds, 0 for one that holds none; a group with a window
    gives it back when they are out of sight. ``nbytes``: a multiple of 16. ``num_elements``: KV elements, 0 for
    metadata and states. ``is_state``: it is the state of a layer without KV, which each token of the request rewrites.
    ``rungs``: of a state, widest first, the first of ``nbytes``; none for a slot that can only stay as it is.
    """

    name: str
    num_tokens: int
    nbytes: int
    num_elements: int
    is_state: bool = False
    rungs: tuple[RungSize, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the slot on each of its rungs, widest first."""
        return tuple(rung.nbytes for rung in self.rungs) or (self.nbytes,)


class Chain(NamedTuple):
    """Sizes that blocks, or states, step down through, widest first; for each rung of the ladder the index of one."""

    sizes: tuple[int, ...]
    floors: tuple[int, ...]


@dataclass(frozen=True)
class GroupSpec:
    """Layers whose KV lives in the same blocks: the rungs of a block, widest first, and the slots of a request.

    ``floors``: for each rung of the ladder the group's own one. At most one of the ``slots`` holds tokens, and it comes
    first; states come next, a bank last. Blocks in the ``recent`` window of a request stay on the first rung.
    ``visible``: tokens that a token sees, itself included; None for all before it. ``num_windows``: windows of a
    request after its prompt that add a pattern to its bank. ``align``: bytes that slabs are a multiple of.
    ``state_floors``: for each rung of the ladder that of a state, of those that step down; none where they do not.

    Slots stand on rungs below zero, each on its own ones, of which the last is the narrowest; see ``slot_rung``. Raises
    ``ValueError`` for parts that do not go together.
    """

    layers: tuple[int, ...]
    block_tokens: int
    rungs: tuple[RungSize, ...]
    floors: tuple[int, ...]
    slots: tuple[RequestSlot, ...]
    recent: RecentWindow
    visible: int | None = None
    has_bank: bool = False
    num_windows: int = 0
    align: int = 1
    state_floors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.floors[0] != 0 or self.floors[-1] != len(self.rungs) - 1 or list(self.floors) != sorted(self.floors):
            raise ValueError(f"floors {self.floors} of {len(self.rungs)} rungs")
        if self.visible is not None and (self.visible < 1 or self.has_bank or self.recent.part):
            raise ValueError("a group with a window has a bank, or a recent window by ratio")
        steps = {len(slot.rungs) for slot in self.slots if slot.is_state}
        if self.state_floors and (steps != {self.state_floors[-1] + 1} or len(self.state_floors) != len(self.floors)):
            raise ValueError(f"floors {self.state_floors} of states on {steps} rungs")

    @property
    def widest(self) -> RungSize:
        """The first rung, on which blocks begin."""
        return self.rungs[0]

    def nbytes(self, rung: int) -> int:
        """Bytes of a block on ``rung``, or of a request's slot, whose rung is negative as in ``Block.rung``."""
        if rung >= 0:
            return self.rungs[rung].nbytes
        slot, step = self.place(rung)
        return self.slots[slot].sizes[step]

    def rung(self, number: int) -> RungSize:
        """The rung of a block or a state that steps down, by its number as in ``Block.rung``."""
        if number >= 0:
            return self.rungs[number]
        slot, step = self.place(number)
        return self.slots[slot].rungs[step]

    def name_of(self, rung: int) -> str:
        """The name of a block's or a state's rung, or of a slot that has none."""
        if rung >= 0:
            return self.rungs[rung].name
        slot, step = self.place(rung)
        return self.slots[slot].rungs[step].name if self.slots[slot].rungs else self.slots[slot].name

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """Of each rung below zero, from -1 on, the slot, and the steps below its widest rung."""
        return tuple((i, step) for i, slot in enumerate(self.slots) for step in reversed(range(len(slot.sizes))))

    @property
    def slot_rungs(self) -> range:
        """All rungs of slots."""
        return range(-len(self._places), 0)

    def place(self, rung: int) -> tuple[int, int]:
        """The slot that stands on a rung below zero, by its index, and how many steps it is below its widest one."""
        return self._places[-1 - rung]

    def slot_of(self, rung: int) -> RequestSlot:
        """The slot that stands on a rung below zero."""
        return self.slots[self.place(rung)[0]]

    def step_of(self, rung: int) -> int:
        """How many steps a block or a slot on ``rung`` is below its widest one."""
        return rung if rung >= 0 else self.place(rung)[1]

    def narrowest(self, rung: int) -> int:
        """The narrowest rung of a block, or of the state, that stands on ``rung``; blocks' for a sink."""
        if rung >= 0 or not (slot := self.slot_of(rung)).is_state:
            return len(self.rungs) - 1
        return rung + len(slot.sizes) - 1 - self.step_of(rung)

    @cached_property
    def widest_rungs(self) -> tuple[int, ...]:
        """The widest rung of each slot."""
        return tuple(-1 - place for place, (_, step) in enumerate(self._places) if not step)

    def slot_floors(self, floor: int) -> tuple[int, ...]:
        """The narrowest rung of each slot of a request, whose ``floor`` is one of the ladder; blocks' for a sink."""
        below, own = self.state_floors[floor] if self.state_floors else 0, self.floors[floor]
        pairs = zip(self.slots, self.widest_rungs, strict=True)
        return tuple(widest + below if slot.is_state else own for slot, widest in pairs)

    def slot_sizes(self, rung: int) -> list[int]:
        """Bytes of a request's slots when it stands on ``rung`` of the ladder."""
        below = self.state_floors[rung] if self.state_floors else 0
        return [slot.sizes[below if slot.is_state else 0] for slot in self.slots]

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The chain of the blocks, then one for all states of equal sizes that step down."""
        states = dict.fromkeys(slot.sizes for slot in self.slots if slot.is_state and self.state_floors)
        blocks = Chain(tuple(rung.nbytes for rung in self.rungs), self.floors)
        return blocks, *(Chain(sizes, self.state_floors) for sizes in states)

    @cached_property
    def sink(self) -> int:
        """Tokens of a request that come before its blocks and stay dense for life."""
        return sum(slot.num_tokens for slot in self.slots)

    @property
    def num_token_slots(self) -> int:
        """Slots of a request that hold tokens: 1 or 0."""
        return int(self.sink > 0)

    @cached_property
    def num_states(self) -> int:
        """Slots of a request that are states."""
        return sum(slot.is_state for slot in self.slots)

    def in_blocks(self, num_tokens: int) -> int:
        """Those of a request's first ``num_tokens`` tokens that lie in blocks; negative within its slot."""
        return num_tokens - self.sink

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that the first ``num_tokens`` tokens of a request take, those out of sight included."""
        return -(-max(0, num_tokens - self.sink) // self.block_tokens)

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of a request with ``num_blocks`` full blocks, after which its next block begins."""
        return self.sink + num_blocks * self.block_tokens

    def newest(self, num_computed: int) -> int:
        """Tokens in blocks that are older than the recent window."""
        return self.recent.older(num_computed) - self.sink

    def next_aging(self, num_computed: int) -> int:
        """Computed tokens, more than ``num_computed``, at which the next block is older than the recent window."""
        aged = max(0, self.newest(num_computed) // self.block_tokens)
        return self.recent.least_computed(self.tokens_in(aged + 1))

    def first_visible(self, num_computed: int) -> int:
        """The first position that the token at ``num_computed``, the next one, sees."""
        return 0 if self.visible is None else max(0, num_computed - self.visible + 1)

    def num_passed(self, num_computed: int) -> int:
        """Leading blocks that no token from ``num_computed`` on sees."""
        if self.visible is None:
            return 0
        return max(0, self.in_blocks(self.first_visible(num_computed))) // self.block_tokens

    @property
    def most_visible(self) -> int:
        """The most blocks of a request that its next token sees, its own included. Only with a window."""
        assert self.visible is not None
        return -(-(self.visible - 1) // self.block_tokens) + 1

    def sees_sink(self, num_computed: int) -> bool:
        """Whether there is a sink, and the token at ``num_computed`` sees some of it."""
        return self.first_visible(num_computed) < self.sink

    def split(self, num_tokens: int, rung: int) -> tuple[int, int]:
        """Blocks of a request of ``num_tokens`` that stay dense, and those that may stand on the group's ``rung``.

        Counted when its last block begins, which is when most are dense, without blocks out of sight; neither number
        falls as a request grows.
        """
        blocks = self.blocks_for(num_tokens)
        begins = self.tokens_in(blocks - 1)
        passed = 0 if self.visible is None else self.num_passed(begins)
        narrow = max(0, self.newest(begins) // self.block_tokens - passed) if rung else 0
        return blocks - passed - narrow, narrow


@dataclass(frozen=True)
class KVSpec:
    """Groups of layers, and when their blocks step down.

    Blocks of all groups begin at the same tokens. ``eager``: blocks step to the last rung as soon as they may;
    otherwise only when memory runs short. ``admit_at``: the rung of the ladder that admission counts with. Raises
    ``ValueError`` for groups that do not go together.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    eager: bool
    admit_at: int

    def __post_init__(self) -> None:
        shapes = {(group.block_tokens, group.sink, len(group.floors)) for group in self.groups}
        if len(shapes) != 1 or not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} groups of {len(shapes)} shapes")

    @cached_property
    def main(self) -> GroupSpec:
        """The group whose dense blocks lie side by side: the first without a window, or else the first."""
        return next((group for group in self.groups if group.visible is None), self.groups[0])

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Indices of the groups whose tokens see all that came before."""
        return tuple(index for index, group in enumerate(self.groups) if group.visible is None)

    @property
    def num_rungs(self) -> int:
        """Rungs of the ladder."""
        return len(self.main.floors)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.main.block_tokens

    @property
    def sink(self) -> int:
        """Tokens of a request before its blocks."""
        return self.main.sink

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """All that steps down, group by group."""
        return tuple(chain for group in self.groups for chain in group.chains)

    @cached_property
    def has_states(self) -> bool:
        """Whether requests have states, which each of their tokens rewrites."""
        return any(group.num_states for group in self.groups)

    @property
    def can_share(self) -> bool:
        """Whether requests may share blocks of a prefix.

        Codes under patterns mean nothing without their request's bank.
        """
        return not any(group.has_bank for group in self.groups)

    @cached_property
    def has_windows(self) -> bool:
        """Whether blocks of some group pass out of sight."""
        return any(group.visible is not None for group in self.groups)
