"""Memory stays flat: nothing is allocated for KV after start-up, and ended requests leave nothing behind."""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path

import pytest

from qkv_engine import Engine, SamplingParams

from ..small_demo import small_demo

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * 4096


@pytest.mark.skipif(not STATM.exists(), reason="reads /proc")
@pytest.mark.parametrize("rounds", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_load_under_pressure_leaves_memory_as_it_was(rounds: int):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with Engine(small_demo(), kv="auto", kv_memory="3MiB", max_num_batched_tokens=256) as engine:
        memory = engine._started.core.runner.cache.memory
        address, nbytes = memory.data_ptr(), memory.nbytes

        def load(seed: int) -> None:
            """One of three loads: oneDNN keeps code for every number of rows that it has multiplied."""
            rng = random.Random(seed % 3)
            prompts = [[rng.randrange(5, 1000) for _ in range(rng.randrange(1, 500))] for _ in range(8)]
            engine.generate(prompts, params)

        for seed in range(3):
            load(seed)
        before = resident_bytes()
        for seed in range(rounds):
            load(seed)
        assert resident_bytes() - before < 24 * 2**20
        stats = engine.stats()
        assert stats.num_demotions > 0 and stats.kv_bytes_used == 0
        assert (memory.data_ptr(), memory.nbytes) == (address, nbytes) and stats.kv_bytes_total == nbytes
        core = engine._started.core
        assert not core.live and not core.registry.owners and not core.registry.rows and not core.scheduler.requests
        assert sys.getsizeof(core.space.tables.store.waves) < 1000
