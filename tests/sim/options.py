"""Swarm testing: one seed draws one random set of options. Rates may be zero, arenas tiny, ladders odd."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor
from types import ModuleType
from typing import Any

from qkv_engine.request import SamplingParams
from qkv_engine.window import RecentWindow

OPEN_END_BLOCKS = 1  # blocks that admission expects of a request without max_tokens: few, so that requests exceed them
# Slot sizes of the rungs, widest first: halves, odd ones that divide no slab, metadata that stays, near neighbours.
LADDERS = (
    (16,), (16, 8), (16, 9), (16, 5), (16, 8, 4), (16, 9, 5), (16, 10, 6), (16, 9, 5, 3), (16, 8, 4, 3), (20, 11, 7, 6),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Layers whose KV has blocks of its own: bytes of a block by rung, and of a request's slots, the sink's first.

    ``floors``: for each rung of the ladder the group's own. ``visible``: tokens that a token sees, itself included.
    ``below``: narrower bytes of each slot, of states that step down, to ``state_floors`` by rung of the ladder.
    """

    block: int
    sink: int
    sizes: tuple[int, ...]
    floors: tuple[int, ...]
    slots: tuple[int, ...]
    recent: int
    recent_ratio: Fraction = Fraction(0)
    visible: int | None = None
    below: tuple[tuple[int, ...], ...] = ()
    state_floors: tuple[int, ...] = (0,)

    def size(self, rung: int) -> int:
        """Bytes of a block, or of a request's slot, which has a negative rung."""
        if rung >= 0:
            return self.sizes[rung]
        slot, step = self._places[rung]
        return self._slot_sizes(slot)[step]

    def _slot_sizes(self, slot: int) -> tuple[int, ...]:
        return (self.slots[slot], *(self.below[slot] if self.below else ()))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """The slot of each rung of one, and how many steps down it stands there."""
        places = dict[int, tuple[int, int]]()
        for slot in range(len(self.slots)):
            for step in range(len(self._slot_sizes(slot)) - 1, -1, -1):
                places[-1 - len(places)] = slot, step
        return places

    def place(self, rung: int) -> tuple[int, int]:
        """The slot that stands on a negative rung, and how many steps down."""
        return self._places[rung]

    def slot_rung(self, slot: int, step: int = 0) -> int:
        """The rung of a slot that many steps down."""
        return next(rung for rung, place in self._places.items() if place == (slot, step))

    def last(self, rung: int) -> int:
        """The narrowest rung of what stands on ``rung``."""
        if rung >= 0:
            return len(self.sizes) - 1
        slot, _ = self._places[rung]
        return self.slot_rung(slot, len(self._slot_sizes(slot)) - 1)

    def slot_sizes(self, floor: int) -> list[int]:
        """Bytes of a request's slots when its states stand on ``floor``, a rung of the ladder."""
        return [(*sizes[:1], *sizes)[1 + self._step(floor, sizes)] for sizes in map(self._slot_sizes, self._slots)]

    def _step(self, floor: int, sizes: tuple[int, ...]) -> int:
        return self.state_floors[floor] if len(sizes) > 1 else 0

    @property
    def _slots(self) -> range:
        return range(len(self.slots))

    @cached_property
    def chains(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Sizes that blocks step down through, and states, those of equal sizes together; floors of each."""
        states = {sizes for sizes in map(self._slot_sizes, self._slots) if len(sizes) > 1}
        return [(self.sizes, self.floors), *((sizes, self.state_floors) for sizes in sorted(states))]

    def all_sizes(self) -> set[int]:
        """Bytes of blocks and slots on all rungs."""
        return {*self.sizes, *(size for slot in self._slots for size in self._slot_sizes(slot))}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that the first tokens of a request have taken since it began."""
        return -(-max(0, num_tokens - self.sink) // self.block)

    def end(self, index: int) -> int:
        """The token behind block ``index``; behind the sink for -1."""
        return self.sink + (index + 1) * self.block

    def recent_tokens(self, num_computed: int) -> int:
        """The newest tokens of a request that stay on the first rung."""
        return max(self.recent, floor(self.recent_ratio * num_computed))

    def num_aged(self, num_computed: int) -> int:
        """Leading blocks of a request that are older than those."""
        return max(0, num_computed - self.recent_tokens(num_computed) - self.sink) // self.block

    def first_seen(self, position: int) -> int:
        """The first of the tokens that the one at ``position`` sees."""
        return 0 if self.visible is None else max(0, position + 1 - self.visible)

    def num_passed(self, num_computed: int) -> int:
        """Leading blocks that neither the next token nor a later one sees."""
        return max(0, self.first_seen(num_computed) - self.sink) // self.block

    def sees_sink(self, num_computed: int) -> bool:
        """Whether the next token sees a token of the sink."""
        return self.first_seen(num_computed) < self.sink


@dataclass(frozen=True)
class Options:
    """All inputs of a simulated run but the seed of its dice. The first group of layers, and those beside it."""

    seed: int
    block: int
    sizes: tuple[int, ...]
    sink: int
    recent: int
    eager: bool
    admit_at: int
    slabs: int  # of the largest size there may be, as many as fill the memory
    slab_blocks: int  # widest blocks of the largest slab
    budget: int
    max_num_seqs: int
    prefix: bool
    num_prompts: int  # shared prompt prefixes to choose from
    salts: int
    quota: float | None
    tenants: int
    longest: int  # blocks of a typical long request
    crowd: int  # waiting requests from which on no more arrive
    arrivals: float
    aborts: float
    forks: float
    faults: float
    bad_blocks: float
    recoveries: float
    evacuations: float
    pinned: float
    floored: float
    open_ended: float
    ahead: bool  # whether the core runs a step ahead
    other_slots: tuple[int, ...] = ()  # bytes of slots of a request that hold no tokens
    num_states: int = 0  # of those, from the first
    state_below: tuple[tuple[int, ...], ...] = ()  # narrower bytes of each, if they step down
    state_floors: tuple[int, ...] = (0,)  # for each rung of the ladder that of states
    recent_ratio: Fraction = Fraction(0)
    has_bank: bool = False  # whether the last of the other slots is a bank
    num_windows: int = 0  # later windows that add a pattern to it
    scored: float = 0.0  # share of requests with ``num_prefill_tokens``
    chunk_tokens: int | None = None  # of a step with decoding requests; None: no limit
    priorities: int = 1  # to choose from
    takes_turns: bool = False  # whether tenants do
    visible: int | None = None  # tokens that a token sees in the first group
    more_groups: tuple[Group, ...] = ()
    resizes: float = 0.0  # changes of the memory's size, a step
    chunk_nbytes: int = 1  # in which memory is given and taken
    host_nbytes: int = 0  # of host memory; 0: there is no host tier
    returns: float = 0.0  # share of requests that go on from one that ended
    has_disk: bool = False
    disk_faults: float = 0.0  # share of reads and writes of the disk that are lost, torn or slow
    hints: float = 0.0  # share of requests that are retained, or of a session
    unseen: float = 0.0  # share of steps in which values of a cached block turn bad while nobody looks
    copies: float = 0.0  # share of steps beside which few bytes may be copied; else any number

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All groups; the rungs of the first one are those of the ladder."""
        slots = (self.sink_nbytes,) * bool(self.sink) + self.other_slots
        floors = tuple(range(len(self.sizes)))
        below = ((),) * bool(self.sink) + self.state_below
        below += ((),) * (len(slots) - len(below))
        first = Group(
            self.block, self.sink, self.sizes, floors, slots, self.recent, self.recent_ratio, visible=self.visible,
            below=below, state_floors=self.state_floors,
        )  # fmt: skip
        return first, *self.more_groups

    @property
    def chain_sizes(self) -> list[tuple[int, ...]]:
        """Sizes of all that steps down, by group."""
        return [sizes for group in self.groups for sizes, _ in group.chains]

    @property
    def block_nbytes(self) -> int:
        """Bytes of the dense blocks that lie side by side: of the first group without a window, or of the first."""
        return next((group for group in self.groups if group.visible is None), self.groups[0]).sizes[0]

    @property
    def sink_nbytes(self) -> int:
        sink_tokens = 1 << (self.sink - 1).bit_length() if self.sink else 0
        return max(1, self.sizes[0] * sink_tokens // self.block) if self.sink else 0

    @property
    def nbytes(self) -> int:
        """Memory: not a whole number of slabs."""
        largest = self.most_slab_nbytes
        return self.slabs * largest + random.Random(-self.seed).randrange(largest)

    @property
    def most_slab_nbytes(self) -> int:
        """Bytes of the largest slab there may be: whole blocks."""
        block = self.block_nbytes
        return max(self.slab_blocks, -(-max(self._slab_sizes(), default=block) // block)) * block

    @property
    def slab_nbytes(self) -> int:
        """Half of the time whole blocks, else any size that blocks fill with no more bytes than they left."""
        rng, block, most = random.Random(self.seed), self.block_nbytes, self.most_slab_nbytes
        firsts = [(*sizes, block)[1] for sizes in self.chain_sizes if sizes[0] == block]
        sizes = range(max(self._slab_sizes(), default=block), most + 1)
        fitting = [size for size in sizes if all(size // first * block >= size for first in firsts)]
        return most if rng.random() < 0.5 else rng.choice(fitting)

    def _slab_sizes(self) -> set[int]:
        return {size for group in self.groups for size in group.all_sizes()} - {self.block_nbytes}

    def spec(self, code: ModuleType) -> Any:
        """The groups as classes of ``code``, the module of specs."""
        groups = []
        for index, group in enumerate(self.groups):
            names, sinks = self.rung_names(index), group.slots[: self.sink > 0]
            others = enumerate(group.slots[len(sinks) :])
            groups.append(
                code.GroupSpec(
                    layers=(index,),
                    block_tokens=self.block,
                    rungs=tuple(code.RungSize(names[i], size, 16.0 / 2**i) for i, size in enumerate(group.sizes)),
                    floors=group.floors,
                    slots=tuple(code.RequestSlot("sink", self.sink, nbytes, 0) for nbytes in sinks)
                    + tuple(
                        code.RequestSlot(
                            f"other{i}",
                            0,
                            nbytes,
                            0,
                            i < self.num_states and not index,
                            self._state_rungs(code, i, index),
                        )
                        for i, nbytes in others
                    ),
                    state_floors=self.state_floors if self.state_below and not index else (),
                    recent=RecentWindow.of(group.recent, group.recent_ratio),
                    visible=group.visible,
                    has_bank=self.has_bank and index == 0,
                    num_windows=self.num_windows if index == 0 else 0,
                )
            )
        return code.KVSpec("tiny", tuple(groups), self.eager, self.admit_at)

    def _state_rungs(self, code: ModuleType, state: int, index: int) -> tuple[Any, ...]:
        """The rungs of a state, in the group with that index; other slots have none."""
        if index or state >= self.num_states:
            return ()
        sizes = enumerate((self.other_slots[state], *(self.state_below[state] if self.state_below else ())))
        return tuple(code.RungSize(f"state{step}", size, 16.0 / 2**step) for step, size in sizes)

    @property
    def state_slots(self) -> list[int]:
        """Those of a request's slots in the first group that are states."""
        return [(self.sink > 0) + index for index in range(self.num_states)]

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of the states of a request on their widest rungs."""
        return [self.groups[0].slots[slot] for slot in self.state_slots]

    def rung_name(self, index: int, rung: int) -> str:
        """The name of a rung of a group's blocks, or of a state's."""
        return self.rung_names(index)[rung] if rung >= 0 else f"state{self.groups[index].place(rung)[1]}"

    def rung_names(self, index: int) -> list[str]:
        """Names of a group's rungs."""
        return [f"{f'group{index}' if index else ''}rung{rung}" for rung in range(len(self.groups[index].sizes))]

    def floor(self, params: SamplingParams) -> int:
        """The narrowest rung that a request with ``params`` allows."""
        if params.kv_pinned:
            return 0
        return len(self.sizes) - 1 if params.kv_floor is None else int(params.kv_floor.removeprefix("rung"))

    def window_ends(self, num_prompt_tokens: int, end: int) -> list[int]:
        """Ends of the windows behind a prompt that add a pattern, up to the block that ends before token ``end``."""
        first = max(1, (num_prompt_tokens - self.sink) // self.block)
        ends = [self.sink + (first + i + 1) * self.block for i in range(self.num_windows)]
        return [each for each in ends if each <= end]

    @property
    def promises_no_preemption(self) -> bool:
        """Whether admission sees all that a running request may come to need, so that no request ever gives way."""
        return not self.open_ended and self.quota is None


def draw(seed: int) -> Options:
    rng = random.Random(seed)

    def rate(most: float) -> float:
        return 0.0 if rng.random() < 0.5 else most * rng.random()

    block = rng.choice((4, 4, 4, 8, 8, 16, 16, 128))
    sizes = rng.choice(LADDERS)
    sink = rng.choice((0, 0, block // 4, block // 2, block, rng.randint(1, block)))
    slab_blocks = rng.choice((1, 1, 2, 2, 3, 3, 4, 7, 16))
    least = 2 + len(sizes) + (sink > 0)
    slabs = max(least, min(64, int(2 ** rng.uniform(1, rng.choice((4, 6.1)))), 64 // slab_blocks))
    blocks = (slabs - len(sizes) + 1) * slab_blocks
    quota = rng.choice((None, None, None, rng.uniform(0.3, 0.9)))
    return Options(
        seed=seed,
        block=block,
        sizes=sizes,
        sink=sink,
        recent=rng.choice((0, 0, 0, block // 2, block, rng.randint(0, 3 * block))),
        eager=len(sizes) > 1 and rng.random() < 0.3,
        admit_at=rng.choice((len(sizes) - 1,) * 4 + (rng.randrange(len(sizes)),)),
        slabs=slabs,
        slab_blocks=slab_blocks,
        budget=rng.choice(
            (max(1, block // 4), rng.randint(2, 16) * max(1, block // 16), rng.randint(16, 128), rng.randint(64, 600))
        ),
        max_num_seqs=rng.choice((1, 2, 4, 8, 16, 16, 16, 16)),
        prefix=rng.random() < 0.7,
        num_prompts=rng.randint(1, 3),
        salts=rng.choice((1, 1, 2)),
        quota=quota,
        tenants=rng.choice((1, 2, 3)) if quota is None else rng.choice((2, 3)),
        longest=max(1, blocks // rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8))),
        crowd=rng.choice((1, 1, 3, 8)),
        arrivals=rng.uniform(0.2, 1.0),
        aborts=rate(0.3),
        forks=rate(1.0),
        faults=rate(0.05),
        bad_blocks=rate(0.05),
        recoveries=rate(0.02),
        evacuations=rate(0.5),
        pinned=rate(0.6),
        floored=rate(0.6),
        open_ended=rate(1.0),
        ahead=rng.random() < 0.5,
    )
