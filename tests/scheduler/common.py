"""Tiny ladders and pools for scheduler tests: a block of the widest rung is as many bytes as the test says."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from qkv_engine.kv.arena import Arena
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.reserve import reserve_nbytes
from qkv_engine.kv.spec import GroupSpec, KVSpec, RequestSlot, RungSize
from qkv_engine.kv.table import BlockTables
from qkv_engine.request import FinishReason, Request, SamplingParams
from qkv_engine.scheduler import Pace, ScheduledBatch, Scheduler
from qkv_engine.window import RecentWindow

BLOCK = 128


def make_group_spec(
    rungs: Sequence[RungSize],
    *,
    floors: Sequence[int] | None = None,
    layers: tuple[int, ...] = (0,),
    sink: int = 0,
    sink_nbytes: int = 0,
    others: tuple[RequestSlot, ...] = (),
    recent: int = 0,
    recent_ratio: Fraction = Fraction(0),
    visible: int | None = None,
    has_bank: bool = False,
    num_windows: int = 0,
    block_tokens: int = BLOCK,
    state_floors: tuple[int, ...] = (),
) -> GroupSpec:
    """A group with bytes chosen by the test. ``others``: slots that hold no tokens, the last one a bank if any is."""
    sinks = (RequestSlot("sink", sink, sink_nbytes, 0),) if sink else ()
    return GroupSpec(
        layers=layers,
        block_tokens=block_tokens,
        rungs=tuple(rungs),
        floors=tuple(range(len(rungs)) if floors is None else floors),
        slots=sinks + others,
        recent=RecentWindow.of(recent, recent_ratio),
        visible=visible,
        has_bank=has_bank,
        num_windows=num_windows,
        state_floors=state_floors,
    )


def make_spec(
    rungs: Sequence[RungSize],
    *,
    eager: bool = False,
    admit_at: int | None = None,
    more_groups: tuple[GroupSpec, ...] = (),
    **options: Any,
) -> KVSpec:
    """A ladder whose first group ``make_group_spec`` makes of ``rungs`` and ``options``."""
    groups = make_group_spec(rungs, **options), *more_groups
    return KVSpec("tiny", groups, eager, len(groups[0].floors) - 1 if admit_at is None else admit_at)


DENSE = make_spec([RungSize("dense16", 16, 16.0)])
BANK = RequestSlot("bank", num_tokens=0, nbytes=3, num_elements=0)
RUNGS = RungSize("dense16", 16, 16.0), RungSize("int8", 8, 8.0), RungSize("int4", 4, 4.0)
LADDER = make_spec(RUNGS)


def make_space(
    num_blocks: float,
    spec: KVSpec = DENSE,
    *,
    slab_blocks: float = 1,
    prefix: bool = False,
    quota: float | None = None,
) -> KVManager:
    """KV memory of ``num_blocks`` widest blocks, with slabs of ``slab_blocks``."""
    block = spec.main.widest.nbytes
    slab = round(slab_blocks * block)
    reserve = reserve_nbytes([chain.sizes for chain in spec.chains], block, slab)
    tables = BlockTables(Arena(round(num_blocks * block), slab, reserve, block_nbytes=block), spec)
    return KVManager(tables, PrefixCache(tables, "model", quota=quota) if prefix else None, quota)


def make_scheduler(
    num_blocks: float, spec: KVSpec = DENSE, *, seqs: int = 8, budget: int = 512, **options
) -> Scheduler:
    space = make_space(num_blocks, spec, **options)
    return Scheduler(space, max_num_seqs=seqs, max_num_batched_tokens=budget)


class FixedPace(Pace):
    """The same chunk tokens whatever steps take."""

    def __init__(self, chunk_tokens: int):
        super().__init__(1.0)
        self._fixed = chunk_tokens

    @property
    def chunk_tokens(self) -> int:
        return self._fixed


def make_request(name: str, prompt: int | list[int], max_tokens: int = 8, *, floor: int = 2, **params) -> Request:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)
    return Request(name, ids, params, max_tokens, floor=floor)


def run(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """What a step does: blocks moved, KV computed, one token sampled where the known ones end, length respected."""
    scheduler.space.tables.store.waves.clear()
    scheduler.space.tables.store.take_fresh()
    for item in batch.items:
        scheduler.computed(item)
        if item.samples:
            scheduler.append_token(item.request, 7)
            if item.request.num_output_tokens == item.request.max_tokens:
                scheduler.finish(item.request, FinishReason.LENGTH)


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in batch.items]
