"""Minutes at the brim: every request ends, the books stay whole, and memory stays where it was."""

from __future__ import annotations

import os
from statistics import fmean

import pytest

from qkv_engine import Engine

from .soak import Load, Memory, Watch, soak

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SECONDS = float(os.environ.get("QKV_SOAK_SECONDS", 600))  # of both presets together; an arena takes 20 to fill
WARM_UP = min(60.0, SECONDS / 4)  # of each
LEAST_USE = 0.95  # of the arena's bytes, reserve included, in the mean over all steps after the warm-up

# What memory may grow by after the warm-up: a graph captured late is allowed for, and so is a larger temporary.
GRAPH_NBYTES = 1 << 20  # on the device as on the host, at most 128 in all
DEVICE_SLACK = 32 << 20
RESERVED_SLACK = 32 << 20
RESIDENT_SLACK = 64 << 20

# Requests that together want more than the arena at 16 bits, and others whose cached blocks fill it. Each running one
# is left a dense block of 1 MiB, so few of them share much memory.
AUTO = Load(clients=32, prompt=(5500, 7600), output=(100, 590), floors=("int8", None, None, None), pinned=0.05)
EAGER = Load(clients=16, prompt=(1000, 7600), output=(1, 590))


@pytest.mark.parametrize(
    ("kv", "load", "memory", "max_num_seqs"), [("auto", AUTO, "1GiB", 24), ("kivi-2", EAGER, "2GiB", 12)]
)
def test_soak(kv: str, load: Load, memory: str, max_num_seqs: int, report: list[str]) -> None:
    with Engine(kv=kv, kv_memory=memory, device="cuda", max_num_seqs=max_num_seqs) as engine:
        watch, ends = soak(engine, load, SECONDS / 2, WARM_UP)
        stats = engine.stats()
        report += [
            f"soak {kv}, {SECONDS / 2:.0f} s: {sum(ends.values()):,} requests ({dict(ends)}), "
            f"{stats.num_steps:,} steps, {stats.generation_tokens:,} tokens, {stats.num_demotions:,} demotions, "
            f"{stats.num_preemptions:,} preemptions, {watch.num_evacuations:,} evacuations",
            f"soak {kv}, {describe_use(watch)}; {describe_memory(watch)}",
        ]
        assert stats.num_failed == stats.num_refused == watch.num_recoveries == 0
        assert stats.num_finished == stats.num_requests == sum(ends.values())
        assert stats.num_running == stats.num_waiting == stats.kv_bytes_used == 0
        assert stats.num_demotions > 0
        engine._loop.call(lambda: check_empty(engine))
    check_flat(*ends_of(watch))
    assert fmean(busy(watch)) > LEAST_USE


def busy(watch: Watch) -> list[float]:
    """Arena use after the warm-up, without the steps at the end that wait for the last requests."""
    return watch.use[watch.num_warm : watch.num_loaded]


def describe_use(watch: Watch) -> str:
    use = busy(watch)
    above = fmean(share > LEAST_USE for share in use)
    return f"arena use: mean {fmean(use):.1%}, least {min(use):.1%}, above {LEAST_USE:.0%} in {above:.1%} of the steps"


def ends_of(watch: Watch) -> tuple[Memory, Memory]:
    """Memory after the warm-up and at the end."""
    return next(memory for seconds, memory in watch.memory if seconds >= WARM_UP), watch.memory[-1][1]


def describe_memory(watch: Watch) -> str:
    first, last = ends_of(watch)
    columns = ("device", "reserved", "resident")
    moved = ", ".join(f"{name} {getattr(first, name) >> 20} -> {getattr(last, name) >> 20}" for name in columns)
    return f"MiB after the warm-up -> at the end: {moved}; graphs {first.num_graphs} -> {last.num_graphs}"


def check_flat(first: Memory, last: Memory) -> None:
    late = GRAPH_NBYTES * max(0, last.num_graphs - first.num_graphs)
    assert last.device - first.device <= DEVICE_SLACK + late
    assert last.reserved - first.reserved <= RESERVED_SLACK + late
    assert last.resident - first.resident <= RESIDENT_SLACK + late


def check_empty(engine: Engine) -> None:
    """Once the prefix cache gives up what it kept, every slab is free."""
    core = engine._started.core
    tables = core.space.tables
    tables.check_integrity()
    while core.space.evict():
        pass
    tables.check_integrity()
    assert tables.arena.used_nbytes == 0 and not tables.store.live_blocks() and not len(tables)
    assert tables.arena._gap == tables.arena.nbytes
    assert not core.live and not core.registry.owners and not core.registry.rows and not core.scheduler.requests
