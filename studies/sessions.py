"""Conversations that come back with longer prompts, in memory for few of them: ``python -m studies.sessions``.

Books of the demo model without memory or device, torch left out: nothing is computed, and all sampled tokens are alike.
Compared are two ways in which cached blocks that no request holds make room: given up whole, and stepped down first.
For a model with states also when their checkpoints are given up.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from qkv_engine.bench.report import number
from qkv_engine.bench.table import Table
from qkv_engine.kv.block import Block
from qkv_engine.kv.checkpoints import StateCheckpoint
from qkv_engine.kv.host_tier import HostTier
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.moves import take_moves
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.slabs import make_tables
from qkv_engine.kv.spec import GroupSpec, KVSpec, RequestSlot, RungSize
from qkv_engine.kv.table import BlockTables
from qkv_engine.request import FinishReason, Request, SamplingParams
from qkv_engine.scheduler import Scheduler
from qkv_engine.window import RecentWindow

from . import results

BLOCK = 128
SINK = 32
RUNGS = (RungSize("dense16", 2**20, 16.0), RungSize("int8", 542_720, 8.0), RungSize("int4", 280_576, 4.0))
NUM_STATES, STATE_NBYTES = 6, 3 * 2**20  # of a request: a checkpoint as large as 18 blocks, as of Qwen3.5-27B
BUDGET = 2048  # tokens of a step
VOCABULARY = 32_000


class Load(NamedTuple):
    """Conversations and what comes beside them. Lengths are tokens; pauses, of one to ``pause``, steps."""

    name: str
    memory_for: float  # conversations at full length that fit at 16 bits
    conversations: int = 20
    turns: int = 8
    first: int = 2000
    more: int = 600
    answer: int = 120
    pause: int = 3000
    system: int = 0  # first tokens that all conversations share
    pinned: int = 0  # every so many conversations one stays at 16 bits; 0: none
    others: int = 0  # steps between requests that never come back; 0: there are none
    window: int | None = None  # tokens that three layers of four see
    states: bool = False  # whether requests have states

    @property
    def longest(self) -> int:
        """Tokens of a conversation when it ends."""
        return self.system + self.first + (self.turns - 1) * self.more + self.turns * self.answer


LOADS = (
    Load("20 x 8 turns", 6),
    Load("20 x 8 turns", 3),
    Load("a shared beginning of 4,000 tokens", 6, system=4000),
    Load("every fourth one at 16 bits", 6, pinned=4),
    Load("and a prompt that never comes back every 400 steps", 6, others=400),
    Load("three layers of four see 1,024 tokens", 6, window=1024),
    Load("12 x 6 turns of a hybrid", 6, conversations=12, turns=6, pause=1500, states=True),
    Load("the same behind 4,000 tokens", 6, conversations=12, turns=6, pause=1500, system=4000, states=True),
)


@dataclass(frozen=True)
class SessionsRow:
    """What one policy made of a load. ``known``: prompt tokens that were computed in an earlier turn.

    ``hits_by_rung``: tokens that were found, by the precision that they had; ``mean_hit_bits`` is their mean.
    """

    load: str
    memory_for: float
    policy: str
    prompt_tokens: int
    known: int
    hits: int
    recomputed: int
    hits_by_rung: dict[str, int]
    mean_hit_bits: float | None
    demotions: int
    idle_demotions: int
    given_up: int
    preemptions: int
    steps: int
    out_nbytes: int = 0
    written_nbytes: int = 0
    fetched_nbytes: int = 0


class GivesUp(KVManager):
    """KV memory whose idle blocks are given up as they are."""

    def idle(self, number: int) -> list[Block]:
        return []


POLICIES: dict[str, type[KVManager]] = {
    "given up whole": GivesUp,
    "stepped down first": KVManager,
    "copied to the host at last": KVManager,
}
HOSTED = "copied to the host at last"


class CheckpointsFirst(KVManager):
    """KV memory in which no idle block makes room while there is a checkpoint."""

    def idle(self, number: int) -> list[Block]:
        return [] if self._oldest() else super().idle(number)

    def evict(self) -> bool:
        checkpoint = self._oldest()
        if checkpoint is None or self.prefix is None:
            return super().evict()
        self.prefix.checkpoints.remove(checkpoint)
        return True

    def _oldest(self) -> StateCheckpoint | None:
        return None if self.prefix is None else self.prefix.checkpoints.oldest()


STATE_POLICIES: dict[str, type[KVManager]] = {
    "given up whole": GivesUp,
    "stepped down first": KVManager,
    "behind all checkpoints": CheckpointsFirst,
}
HOST_MEMORY = 4  # times KV memory


@dataclass
class Conversation:
    """The tokens so far, and what the books told of its prompts."""

    index: int
    tokens: list[int]
    params: SamplingParams
    turns_left: int
    due: int
    known: int = 0


@dataclass
class Run:
    """A load on one policy, step by step."""

    load: Load
    policy: str
    seed: int = 0
    found: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        load, self.rng = self.load, random.Random(self.seed)
        spec = make_spec(load.window, load.states)
        tables = make_tables(spec, round(load.memory_for * sum(dense_nbytes(g, load.longest) for g in spec.groups)))
        self.space = self.make_space(tables)
        self.scheduler = Scheduler(self.space, max_num_seqs=64, max_num_batched_tokens=BUDGET)
        self.asked: dict[str, Conversation] = {}  # by request, while it is answered
        self.step = 0
        system = self._tokens(load.system)
        self.conversations = [self._begin(index, system) for index in range(load.conversations)]

    def make_space(self, tables: BlockTables) -> KVManager:
        """The books of the policy over ``tables``."""
        arena = tables.arena
        is_hosted, nbytes = self.policy == HOSTED, HOST_MEMORY * arena.nbytes
        self.tier = HostTier(tables.spec, nbytes, arena.slab_nbytes) if is_hosted else None
        return policies(self.load)[self.policy](tables, PrefixCache(tables, "model", self.tier))

    def _begin(self, index: int, system: list[int]) -> Conversation:
        load = self.load
        is_pinned = load.pinned > 0 and index % load.pinned == 0
        params = SamplingParams(max_tokens=load.answer, ignore_eos=True, kv_pinned=is_pinned)
        due = self.rng.randint(1, load.pause)
        return Conversation(index, system + self._tokens(load.first), params, load.turns, due)

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(length)]

    def finish(self) -> SessionsRow:
        """Runs until all conversations have ended."""
        while any(c.turns_left for c in self.conversations) or self.scheduler.has_work:
            self.step += 1
            self._submit()
            self._advance()
        load, found, store = self.load, self.found, self.space.tables.store
        bits = {rung.name: rung.bits for rung in RUNGS}
        total = self.rungs.total()
        mean = sum(bits[name] * n for name, n in self.rungs.items()) / total if total else None
        return SessionsRow(
            load.name, load.memory_for, self.policy, found["prompt"], found["known"], found["hit"],
            found["recomputed"], {rung.name: self.rungs[rung.name] for rung in RUNGS}, mean,
            store.num_demotions.total(), store.num_idle_demotions.total(), found["given up"],
            self.scheduler.num_preemptions, self.step, *(self.tier.stats()[3:6] if self.tier else (0, 0, 0)),
        )  # fmt: skip

    def _submit(self) -> None:
        for conversation in self.conversations:
            if conversation.due == self.step:
                name = f"c{conversation.index}/{conversation.turns_left}"
                self._add(name, list(conversation.tokens), conversation.params)
                self.asked[name] = conversation
        if self.load.others and self.step % self.load.others == 0:
            params = SamplingParams(max_tokens=self.load.answer, ignore_eos=True)
            self._add(f"o{self.step}", self._tokens(self.load.first), params)

    def _add(self, name: str, ids: list[int], params: SamplingParams) -> None:
        floor = 0 if params.kv_pinned else self.space.num_rungs - 1
        self.scheduler.add(Request(name, ids, params, self.load.answer, floor=floor))

    def _advance(self) -> None:
        """A step, or the next one in which something is due if nobody runs."""
        if not self.scheduler.has_work:
            self.step = min((c.due for c in self.conversations if c.due > self.step), default=self.step + 1) - 1
            return
        cached = len(self.space.prefix) if self.space.prefix else 0
        batch = self.scheduler.schedule()
        self.found["given up"] += max(0, cached - (len(self.space.prefix) if self.space.prefix else 0))
        take_moves(self.space.tables)
        self.space.confirm(self.space.num_commands)
        for request in batch.started:
            self._note_start(request)
        for item in batch.items:
            self.scheduler.computed(item)
            if item.samples:
                self.scheduler.append_token(item.request, 7)
                if item.request.num_output_tokens == item.request.max_tokens:
                    self.scheduler.finish(item.request, FinishReason.LENGTH)
                    self._note_end(item.request)

    def _note_start(self, request: Request) -> None:
        conversation = self.asked.get(request.request_id)
        if conversation is None or request.num_preemptions:
            return
        self.found["prompt"] += request.num_prompt_tokens
        known = self.space.prefix.next_end(conversation.known) - BLOCK if self.space.prefix else 0  # in full blocks
        self.found["known"] += max(0, known) if conversation.known else 0
        self.found["hit"] += request.num_cached_tokens
        self.found["recomputed"] += max(0, known - request.num_cached_tokens) if conversation.known else 0
        self.rungs.update(request.cached_tokens)

    def _note_end(self, request: Request) -> None:
        conversation = self.asked.pop(request.request_id, None)
        if conversation is None:
            return
        conversation.known = len(request.token_ids) - 1
        conversation.tokens = request.token_ids + self._tokens(self.load.more)
        conversation.turns_left -= 1
        conversation.due = self.step + self.rng.randint(1, self.load.pause) if conversation.turns_left else 0


def policies(load: Load) -> dict[str, type[KVManager]]:
    """Those that are compared on a load."""
    return STATE_POLICIES if load.states else POLICIES


def make_spec(window: int | None, states: bool = False) -> KVSpec:
    """The demo model under auto; with a ``window`` layers of another model, three of four with it."""
    full = _group((0,), RUNGS, None)
    if states:
        slots = tuple(RequestSlot("state", 0, STATE_NBYTES, 0, True) for _ in range(NUM_STATES))
        full = replace(full, slots=full.slots + slots)
    if window is None:
        return KVSpec("auto", (full,), False, len(RUNGS) - 1)
    few = tuple(RungSize(rung.name, 3 * rung.nbytes, rung.bits) for rung in RUNGS[:2])
    return KVSpec("auto", (full, _group((1, 2, 3), few, window)), False, len(RUNGS) - 1)


def _group(layers: tuple[int, ...], rungs: tuple[RungSize, ...], window: int | None) -> GroupSpec:
    sink = RequestSlot("sink", SINK, rungs[0].nbytes * SINK // BLOCK, 0)
    floors = tuple(min(rung, len(rungs) - 1) for rung in range(len(RUNGS)))
    return GroupSpec(layers, BLOCK, rungs, floors, (sink,), RecentWindow(0), window, align=128)


def dense_nbytes(group: GroupSpec, num_tokens: int) -> int:
    """Bytes of a request's blocks in a group on the first rung."""
    number = group.blocks_for(num_tokens)
    if group.visible is not None:
        number = min(number, group.most_visible)
    return number * group.widest.nbytes + sum(slot.nbytes for slot in group.slots)


def sessions_table(rows: Sequence[SessionsRow]) -> Table:
    """A line a load and policy."""
    headers = [
        "load", "memory for", "idle blocks are", "known", "found", "recomputed", "bits found", "demotions",
        "of idle blocks", "given up", "preempted", "GiB out", "ahead", "fetched",
    ]  # fmt: skip
    cells = [
        [
            *(row.load, number(row.memory_for, 0), row.policy),
            *(number(value, 0) for value in (row.known, row.hits, row.recomputed)),
            number(row.mean_hit_bits, 1),
            *(number(value, 0) for value in (row.demotions, row.idle_demotions, row.given_up, row.preemptions)),
            *(number(value / 2**30, 1) for value in (row.out_nbytes, row.written_nbytes, row.fetched_nbytes)),
        ]
        for row in rows
    ]
    return Table("conversations that come back", headers, cells, [], text=("load",))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.sessions", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    rows, code = results.collect(Run(load, policy, args.seed).finish() for load in LOADS for policy in policies(load))
    if rows:
        results.deliver(args, rows, sessions_table(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
