"""Tiny ladders and pools for scheduler tests: a block of the widest rung is as many bytes as the test says."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from qkv_engine.device.ladder import RequestSlot
from qkv_engine.kv.arena import Arena
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.table import BlockTables, reserve_nbytes
from qkv_engine.request import FinishReason, Request, SamplingParams
from qkv_engine.scheduler import Pace, ScheduledBatch, Scheduler
from qkv_engine.window import RecentWindow

BLOCK = 128


@dataclass(frozen=True)
class TinyRung:
    name: str
    block_nbytes: int
    bits: float


@dataclass(frozen=True)
class TinyLadder:
    """Has what the books ask of ``kv.ladder.Ladder``, with bytes chosen by the test."""

    rungs: tuple[TinyRung, ...]
    sink: int = 0
    recent: int = 0
    eager: bool = False
    name: str = "tiny"
    admit_at: int = 99
    sink_nbytes: int = 0
    others: tuple[RequestSlot, ...] = ()  # slots that hold no tokens; the last one the bank, if there are patterns
    recent_ratio: Fraction = Fraction(0)
    has_bank: bool = False
    num_windows: int = 0
    align: int = 1

    @property
    def widest(self) -> TinyRung:
        return self.rungs[0]

    @cached_property
    def window(self) -> RecentWindow:
        return RecentWindow.of(self.recent, self.recent_ratio)

    @cached_property
    def slots(self) -> tuple[RequestSlot, ...]:
        sinks = (RequestSlot("sink", self.sink, self.sink_nbytes, 0),) if self.sink else ()
        return sinks + self.others


DENSE = TinyLadder((TinyRung("dense16", 16, 16.0),))
BANK = RequestSlot("bank", num_tokens=0, nbytes=3, num_elements=0)
LADDER = TinyLadder((TinyRung("dense16", 16, 16.0), TinyRung("int8", 8, 8.0), TinyRung("int4", 4, 4.0)))


def make_space(
    num_blocks: float,
    ladder: TinyLadder = DENSE,
    *,
    slab_blocks: float = 1,
    prefix: bool = False,
    quota: float | None = None,
) -> KVManager:
    """KV memory of ``num_blocks`` widest blocks, with slabs of ``slab_blocks``."""
    block = ladder.widest.block_nbytes
    slab = round(slab_blocks * block)
    reserve = reserve_nbytes([rung.block_nbytes for rung in ladder.rungs], slab)
    tables = BlockTables(Arena(round(num_blocks * block), slab, reserve, block_nbytes=block), ladder)
    return KVManager(tables, PrefixCache(tables, "model") if prefix else None, quota)


def make_scheduler(
    num_blocks: float, ladder: TinyLadder = DENSE, *, seqs: int = 8, budget: int = 512, **options
) -> Scheduler:
    space = make_space(num_blocks, ladder, **options)
    return Scheduler(space, max_num_seqs=seqs, max_num_batched_tokens=budget)


class FixedPace(Pace):
    """The same chunk tokens whatever steps take."""

    def __init__(self, chunk_tokens: int):
        super().__init__(1.0)
        self._fixed = chunk_tokens

    @property
    def chunk_tokens(self) -> int:
        return self._fixed


def make_request(name: str, prompt: int | list[int], max_tokens: int = 8, **params) -> Request:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    return Request(name, ids, SamplingParams(temperature=0.0, max_tokens=max_tokens, **params), max_tokens)


def run(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """What a step does: blocks moved, KV computed, one token sampled where the known ones end, length respected."""
    scheduler.space.tables.waves.clear()
    scheduler.space.tables.take_fresh()
    for item in batch.items:
        scheduler.computed(item)
        if item.samples:
            scheduler.append_token(item.request, 7)
            if item.request.num_output_tokens == item.request.max_tokens:
                scheduler.finish(item.request, FinishReason.LENGTH)


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in batch.items]
