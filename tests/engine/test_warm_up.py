"""The warm-up request meets every rung and leaves nothing behind."""

from __future__ import annotations

import pytest

from qkv_engine import Engine, SamplingParams
from qkv_engine.device.gpu.warm_up import warm_up

from ..small_demo import small_demo


@pytest.mark.parametrize("kv", ["bf16", "auto", "int4", "kivi-2", "patternkv"])
@pytest.mark.parametrize("memory", ["1536KiB", "8MiB"])
def test_every_rung_is_met_and_nothing_is_left(kv: str, memory: str, monkeypatch: pytest.MonkeyPatch):
    with Engine(small_demo(), kv=kv, kv_memory=memory) as engine:
        runner = engine._started.core.runner
        tables, met = runner.cache.tables, set()
        demote = tables.demote

        def spy(steps):
            steps = list(steps)
            met.update((block.rung, rung) for block, rung in steps)
            return demote(steps)

        monkeypatch.setattr(tables, "demote", spy)
        engine._loop.call(lambda: warm_up(runner))
        if memory == "8MiB":
            assert (
                met
                == {
                    "bf16": set(),
                    "auto": {(0, 1), (1, 2)},
                    "int4": {(0, 1)},
                    "kivi-2": {(0, 1)},
                    "patternkv": {(0, 1)},
                }[kv]
            )
        stats = engine.stats()
        assert (stats.kv_bytes_used, stats.num_demotions, stats.kv_bytes_peak, len(tables)) == (0, 0, 0, 0)
        tables.check_integrity()
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        assert len(engine.generate([[5, 6]], params)[0].outputs[0].token_ids) == 3
