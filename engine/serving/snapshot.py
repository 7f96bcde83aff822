"""The snapshot that ``Engine.stats()`` returns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ..device.cache import total_nbytes
from ..device.host_disk import HostDisk
from ..device.per_token import per_token
from ..kv.host_tier import HostTier
from ..kv.manager import KVManager
from ..metrics import EngineStats
from ..started import Started


def take_snapshot(started: Started) -> EngineStats:
    """Load, memory and counters now. For the engine's own thread."""
    core, space = started.core, started.core.space
    cache, counters = core.runner.cache, core.counters
    peak, fullest, ladder = cache.peak, cache.fullest, started.ladder
    held = total_nbytes(fullest) - fullest["state"]  # of KV
    widest_tokens, floor_tokens = cache.capacity
    bits = {name: per_token(ladder, rung, started.max_model_len).bits for rung, name in enumerate(ladder.names)}
    blocks = cache.blocks_by_group()
    groups = list(zip(ladder.groups, blocks, strict=True)) if len(blocks) > 1 else []
    idle = space.prefix.idle_nbytes if space.prefix else 0
    host = None if space.prefix is None or space.prefix.host is None else space.prefix.host.tier
    return EngineStats(
        time=time.monotonic(),
        model=started.name,
        device=str(started.device),
        dtype=str(started.dtype).removeprefix("torch."),
        kv=ladder.name,
        max_model_len=started.max_model_len,
        num_threads=started.threads.number,
        num_running=len(core.scheduler.running),
        num_waiting=len(core.scheduler.waiting),
        num_requests=counters.num_requests,
        num_finished=counters.num_finished,
        num_failed=counters.num_failed,
        num_refused=counters.num_refused,
        num_steps=counters.num_steps,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        num_preemptions=counters.num_preemptions,
        num_demotions=sum(cache.tables.store.num_demotions.values()),
        demotions=_by_step(cache.tables.store.num_demotions),
        num_idle_demotions=sum(cache.tables.store.num_idle_demotions.values()),
        idle_demotions=_by_step(cache.tables.store.num_idle_demotions),
        prefix_query_tokens=space.prefix.num_queried_tokens if space.prefix else 0,
        prefix_hit_tokens=space.prefix.num_hit_tokens if space.prefix else 0,
        prefix_hits=dict(space.prefix.hit_tokens) if space.prefix else {},
        num_checkpoints=space.prefix.checkpoints.num_taken if space.prefix else 0,
        num_checkpoint_hits=space.prefix.checkpoints.num_hits if space.prefix else 0,
        kv_bytes_total=cache.nbytes,
        kv_bytes_used=cache.arena.used_nbytes - idle,
        kv_bytes_cached=idle,
        kv_bytes_checkpoints=space.prefix.checkpoints.nbytes if space.prefix else 0,
        kv_bytes_reserve=cache.arena.reserve_nbytes,
        kv_bytes_peak=total_nbytes(peak),
        kv_bytes_codes=peak["codes"],
        kv_bytes_meta=peak["meta"],
        kv_bytes_dense=peak["dense"],
        kv_bytes_state=peak["state"],
        kv_rungs=bits,
        kv_blocks=dict(sum(blocks, Counter())),
        kv_states=dict(cache.states_by_format()),
        kv_group_blocks=tuple(dict(found) for _, found in groups),
        kv_group_bytes=tuple(sum(r.block_nbytes * found[r.name] for r in group.rungs) for group, found in groups),
        kv_group_windows=tuple(group.visible for group, _ in groups),
        kv_tokens_capacity=widest_tokens,
        kv_tokens_floor=floor_tokens,
        basis_miss=core.basis_watch.read() if core.basis_watch else None,
        effective_bits=8 * held / fullest["elements"] if held else bits[ladder.names[0]],
        **({} if host is None else _host_figures(host, started.num_ranks)),
        **({} if started.disk is None else _store_figures(started.disk, space)),
    )


def _store_figures(disk: HostDisk, space: KVManager) -> dict[str, int]:
    """Those of ``EngineStats`` about the KV store."""
    found, moved = disk.stats(), space.disk_stats()
    return {
        "store_bytes_total": found.max_nbytes,
        "store_bytes_used": found.nbytes,
        "store_pieces": found.num_pieces,
        "store_bytes_written": found.written_nbytes,
        "store_bytes_read": found.read_nbytes,
        "store_hit_tokens": moved.read_tokens,
        "store_dropped": moved.num_lost + found.num_dropped,
        "store_failed": moved.num_failed,
    }


def _host_figures(tier: HostTier, num_ranks: int) -> dict[str, int]:
    """Those of ``EngineStats`` about host memory; ranks have equal shares of it."""
    found = tier.stats()
    nbytes = {
        "host_bytes_total": found.nbytes,
        "host_bytes_used": found.used_nbytes,
        "host_bytes_peak": tier.arena.peak_nbytes,
        "host_bytes_written": found.out_nbytes + found.written_nbytes,
        "host_bytes_fetched": found.fetched_nbytes,
        "host_bytes_dropped": found.dropped_nbytes,
    }
    tokens = sum(found.fetched_tokens.values())
    shares = {name: number * num_ranks for name, number in nbytes.items()}
    return {**shares, "host_blocks": found.num_blocks, "host_fetched_tokens": tokens}


def _by_step(demotions: Mapping[tuple[str, str], int]) -> dict[str, int]:
    return {f"{old}->{new}": number for (old, new), number in demotions.items()}
