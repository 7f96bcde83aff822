"""Requests whose prompts were never computed: the books, the rungs and the steps are the engine's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from qkv_engine.bench.filled import FilledEngine, spread_prompts
from qkv_engine.bench.sizing import largest_batch
from qkv_engine.config import EngineConfig
from qkv_engine.errors import QKVError
from qkv_engine.kv.block import slot_rung
from qkv_engine.presets import resolve_kv


@contextmanager
def filled(kv: str, nbytes: int = 2**25, **options: object) -> Iterator[FilledEngine]:
    options |= {"prefix_caching": False, "device": "cpu", "max_model_len": 1024}
    config = EngineConfig(model="demo", load_format="random", kv=resolve_kv(kv), kv_memory=nbytes, **options)
    with FilledEngine(config) as core:
        yield core


def rungs(core: FilledEngine, index: int = 0) -> list[int]:
    return [block.rung for block in core.cache.tables.main[f"bench-{index}"].blocks]


def test_requests_decode_from_where_they_were_filled_to() -> None:
    with filled("bf16") as core:
        core.begin([300, 5], 400)
        assert [r.num_computed_tokens for r in core.running] == [300, 5]
        assert [r.num_output_tokens for r in core.running] == [1, 1]
        core.cache.tables.check_integrity()
        assert core.seconds_per_step(7) > 0
        assert [(r.num_computed_tokens, r.num_output_tokens) for r in core.running] == [(307, 8), (12, 8)]
        per_token = core.cache.ladder.widest.block_nbytes // 128
        assert core.kv_nbytes_read() == (307 + 12) * per_token
        core.end()
        assert not core.running and not core.cache.tables.arena.used_nbytes
        core.begin([9], 20)
        assert len(core.running) == 1


@pytest.mark.parametrize(("runs_ahead", "slow"), [(False, [1]), (True, [1, 2])])
def test_the_start_of_steps_is_not_timed(monkeypatch: pytest.MonkeyPatch, runs_ahead: bool, slow: list[int]) -> None:
    """A step that is run ahead has ended when the next one has been launched."""
    with filled("bf16") as core:
        core.begin([300], 400)
        step, clock, calls = core.core.step, 0.0, 0

        def timed_step() -> None:
            nonlocal clock, calls
            step()
            calls += 1
            clock += 100.0 if calls in slow else 2.0

        monkeypatch.setattr(core.core, "step", timed_step)
        monkeypatch.setattr(core.core, "runs_ahead", runs_ahead)
        monkeypatch.setattr("qkv_engine.bench.filled.time.perf_counter", lambda: clock)
        found = core.seconds_per_step(10)
        assert found == 2.0 * (10 - len(slow)) / 9 and calls == 10
        calls = 0
        assert core.seconds_per_step(1) == 100.0


def test_what_was_filled_is_finite_and_not_zero() -> None:
    with filled("bf16") as core:
        core.begin([300], 400)
        for block in core.cache.tables.main["bench-0"].blocks[:2]:
            values = core.cache.memory[block.slot.address :][: block.slot.nbytes].view(torch.bfloat16).float()
            assert values.isfinite().all() and values.std() == pytest.approx(1, abs=0.02)


def test_eager_ladders_settle_at_once() -> None:
    with filled("int4") as core:
        core.begin([32 + 5 * 128 + 107, 40], 1000)
        assert rungs(core) == [1] * 5 + [0]
        assert [slot.rung for slot in core.cache.tables.main["bench-0"].slots] == [slot_rung(0)]
        assert rungs(core, 1) == [0]
        core.seconds_per_step(25)  # over a block's end: the engine seals by itself
        assert rungs(core) == [1] * 6 + [0]
        core.cache.tables.check_integrity()


def test_codes_of_two_layers_are_read_twice() -> None:
    with filled("xquant") as core:
        core.begin([4 * 128], 700)
        assert rungs(core) == [1] * 3 + [0]
        wide, narrow = core.cache.ladder.rungs
        twice = 2 * 2 * 128 * 128 // 8  # V at 1 bit of two heads, layers 4 and 6
        assert core.kv_nbytes_read() == wide.block_nbytes + 3 * (narrow.block_nbytes + twice)


def test_a_recent_window_stays_dense() -> None:
    with filled("kivi-2") as core:
        core.begin([4 * 128], 700)
        assert rungs(core) == [1] * 3 + [0]


def test_pressure_steps_blocks_down_only_as_far_as_memory_asks() -> None:
    with filled("auto") as roomy:
        roomy.begin([1000] * 2, 1024)
        assert {rung for i in range(2) for rung in rungs(roomy, i)} == {0}
    with filled("auto") as tight:
        batch = largest_batch(tight.cache.ladder, 2**25, 1024)
        tight.begin([1000] * batch, 1024)
        found = {rung for i in range(batch) for rung in rungs(tight, i)}
        assert found >= {0, 2} and len(tight.running) == batch > 3
        tight.seconds_per_step(20)
        tight.cache.tables.check_integrity()
        assert tight.core.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    "kv", ["bf16", "auto", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("int8", "int4", "kivi-2"))]
)
def test_the_largest_batch_runs_at_once_to_its_last_token(kv: str) -> None:
    with filled(kv, 2**24) as core:
        batch = largest_batch(core.cache.ladder, 2**24, 500)
        core.begin([480] * batch, 500)
        core.seconds_per_step(19)
        assert len(core.running) == batch and core.core.scheduler.num_preemptions == 0
        core.cache.tables.check_integrity()
        with pytest.raises(QKVError, match="ended early"):
            core.seconds_per_step(2)


def test_prompts_are_spread_over_one_block() -> None:
    lengths = spread_prompts(64, 1000, 1030)
    assert sorted({b - a for a, b in pairwise(lengths)}) == [0, 2]
    assert min(lengths) == 936 and max(lengths) == 1030
    assert spread_prompts(1, 10, 100) == [1]
