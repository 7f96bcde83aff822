"""The miss of graded blocks: exact values of ranges written by hand, when it is measured, and the one warning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine import Engine, KVConfig, RungConfig, SamplingParams
from qkv_engine.bench.texts import task_texts
from qkv_engine.cli.main import main
from qkv_engine.device.basis_miss import LEAST_VARIANCE, SQUARED_RANGE, MissMeter
from qkv_engine.device.cache import KVCache
from qkv_engine.device.layouts import build_ladder
from qkv_engine.kernels.formats.family import SideBytes
from qkv_engine.kernels.formats.graded.reference import pairs
from qkv_engine.kv.block import Block
from qkv_engine.serving import basis_watch
from qkv_engine.serving.basis_watch import LEAST_STEPS, LIMIT, NUM_BLOCKS, BasisWatch, watch_bases

CPU, LAYERS, HEADS, CHANNELS = torch.device("cpu"), 2, 2, 64
DENSE = RungConfig("dense32", "dense32", "dense32")
WIDE = RungConfig("int8", "int8-channel-128", "int8-channel-128")
GRADED = RungConfig("graded", ("graded-16x4-16x2", "graded-16x8"), ("int8-channel-128", "graded-16x4-16x1"))
LAST = {(0, "k"): slice(16, 32), (1, "k"): slice(16), (1, "v"): slice(16, 32)}  # of the graded sides


def make_cache(*rungs: RungConfig, num_blocks: int = 64) -> KVCache:
    config = KVConfig(name="mine", rungs=(DENSE, *rungs))
    ladder = build_ladder(config, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=CHANNELS, dtype=torch.float32)
    cache = KVCache(ladder, num_blocks * ladder.widest.block_nbytes, CPU)
    cache.memory.zero_()
    return cache


def variances() -> list[tuple[Tensor, Tensor]]:
    """Falling by a hundredth from channel to channel, others in each layer, side and head."""
    falling = (1 + torch.arange(HEADS))[:, None] * 0.99 ** torch.arange(CHANNELS)
    return [((1 + layer) * falling, (5 + layer) * falling) for layer in range(LAYERS)]


def demoted(cache: KVCache, number: int, name: str = "a", to: int = -1) -> list[Block]:
    """Blocks of a new request that stand on the last rung, their moves forgotten."""
    tables = cache.tables
    tables.open(name, cache.ladder.last)
    assert tables.reserve(name, 128 * number)
    blocks, rung = tables.main[name].blocks, range(len(cache.ladder.names))[to]
    assert tables.demote([(block, rung) for block in blocks]) == number
    tables.store.waves.clear()
    return blocks


def write_ranges(cache: KVCache, block: Block, layer: int, name: str, ranges: Tensor) -> None:
    """Ranges [H, 16] of the last channels with codes of a graded side."""
    rung = cache.ladder.main.rungs[block.rung]
    index = 2 * layer + (name == "v")
    side, place = rung.layout.sides[index], rung.layout.places[index]
    codes, meta = block.slot.address + place.codes, block.slot.address + place.meta
    memory = cache.memory[None]
    rows = SideBytes(memory[:, codes : codes + side.codes_nbytes], memory[:, meta : meta + side.meta_nbytes])
    pairs(rows, side)[1, 0, :, LAST[layer, name]] = ranges.half()


def write_misses(cache: KVCache, blocks: list[Block], misses: list[float]) -> None:
    """Ranges with which heads have ``misses``, those of each graded side."""
    heads = iter(misses)
    for layer, name in LAST:
        variance = variances()[layer][name == "v"][:, LAST[layer, name]]
        scale = torch.tensor([next(heads) for _ in range(HEADS)])[:, None]
        for block in blocks:
            write_ranges(cache, block, layer, name, (SQUARED_RANGE * scale * variance).sqrt())


def test_the_mean_squared_range_is_that_of_gaussian_samples():
    samples = torch.randn(200_000, 128, generator=torch.Generator().manual_seed(0))
    low, high = samples.aminmax(dim=1)
    assert float((high - low).square().mean()) == pytest.approx(SQUARED_RANGE, rel=1e-3)


def test_the_quarter_of_heads_that_misses_most_counts():
    cache = make_cache(GRADED)
    meter = MissMeter(cache.memory, cache.ladder, variances())
    first, second = demoted(cache, 2)
    assert meter.rungs == {"graded"} and meter.is_graded(first)
    write_misses(cache, [first], [1, 2, 3, 0.5, 0.25, 1])  # six heads: two count
    assert meter.begin([first]).wait() == [pytest.approx(2.5, rel=1e-3)]
    write_misses(cache, [second], [5, 0, 1, 0.5, 0.25, 1])
    assert meter.begin([first, second]).wait() == [pytest.approx((3 + 2) / 2, rel=1e-3)]  # of blocks: 3, 1, 2, ..


def test_channels_count_alike_but_for_those_that_hardly_vary():
    cache = make_cache(GRADED)
    known = variances()
    known[0][0][:, 16:24] = 1e-9  # far below a thousandth of the head's largest
    meter = MissMeter(cache.memory, cache.ladder, known)
    (block,) = demoted(cache, 1)
    least = LEAST_VARIANCE * known[0][0][:, :1]
    ranges = torch.cat((least.expand(-1, 8) * 9, known[0][0][:, 24:32] * 3), 1)
    write_ranges(cache, block, 0, "k", (SQUARED_RANGE * ranges).sqrt())
    assert meter.begin([block]).wait() == [pytest.approx(6, rel=2e-2)]


def test_heads_that_never_vary_do_not_count():
    cache = make_cache(GRADED)
    known = variances()
    known[0][0].zero_()
    meter = MissMeter(cache.memory, cache.ladder, known)
    (block,) = demoted(cache, 1)
    write_ranges(cache, block, 0, "k", torch.full((HEADS, 16), 100.0))
    assert meter.begin([block]).wait() == [0.0]


@pytest.mark.gpu
def test_a_gpu_finds_the_same():
    cache = make_cache(GRADED)
    blocks = demoted(cache, 3)
    write_misses(cache, blocks, [1, 2, 3, 0.5, 0.25, 1])
    found = MissMeter(cache.memory.cuda(), cache.ladder, variances()).begin(blocks).wait()
    assert found == pytest.approx(MissMeter(cache.memory, cache.ladder, variances()).begin(blocks).wait())


def test_nothing_is_watched_without_bases_or_graded_rungs():
    assert watch_bases(make_cache(GRADED), None) is None
    assert watch_bases(make_cache(WIDE), variances()) is None
    assert watch_bases(make_cache(WIDE, GRADED), variances()) is not None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> BasisWatch:
    """A watch whose periods are over at once."""
    monkeypatch.setattr(basis_watch, "PERIOD", 0.0)
    found = watch_bases(make_cache(WIDE, GRADED), variances())
    assert found is not None
    return found


def test_the_newest_blocks_are_measured_once_they_are_graded(watch: BasisWatch):
    cache = watch._cache
    assert watch.read() is None
    demoted(cache, 3, "wide", to=1)
    assert watch.read() is None  # of 8 bits in all channels: not graded
    old = demoted(cache, 3, "old")
    write_misses(cache, old, [4] * 6)
    assert watch.read() == pytest.approx(4, rel=1e-3)
    new = demoted(cache, 3, "new")
    write_misses(cache, new, [2] * 6)
    assert watch.read() == pytest.approx(3, rel=1e-3)
    write_misses(cache, new, [8] * 6)
    assert watch.read() == pytest.approx(3, rel=1e-3)  # no block stepped down since
    for name in ("wide", "old", "new"):
        cache.tables.release(name)
    assert watch.read() == pytest.approx(3, rel=1e-3)  # the latest


def test_blocks_whose_moves_are_still_noted_are_not_read(watch: BasisWatch):
    tables = watch._cache.tables
    demoted(watch._cache, 1)
    tables.store.waves.append([])
    assert watch.read() is None
    tables.store.waves.clear()
    assert watch.read() == 0.0


def test_a_period_lies_between_measurements(watch: BasisWatch, monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(basis_watch, "PERIOD", 1.0)
    monkeypatch.setattr(basis_watch.time, "monotonic", lambda: now)
    watch.look()
    write_misses(watch._cache, demoted(watch._cache, 1, "a"), [2] * 6)
    assert watch.read() == pytest.approx(2, rel=1e-3)  # the first one at once
    write_misses(watch._cache, demoted(watch._cache, 1, "b"), [4] * 6)
    assert watch.read() == pytest.approx(2, rel=1e-3)
    now = 101.0
    assert watch.read() == pytest.approx(3, rel=1e-3)


def test_values_that_are_not_finite_change_nothing(watch: BasisWatch):
    write_misses(watch._cache, demoted(watch._cache, 1, "a"), [2] * 6)
    assert watch.read() == pytest.approx(2, rel=1e-3)
    write_misses(watch._cache, demoted(watch._cache, 1, "b"), [float("nan")] * 6)
    assert watch.read() == pytest.approx(2, rel=1e-3)


def run(watch: BasisWatch, name: str, number: int, miss: float) -> None:
    """Steps at whose end ``number`` blocks with a ``miss`` have become graded."""
    write_misses(watch._cache, demoted(watch._cache, number, name), [miss] * 6)
    watch.look()
    watch.look()
    watch._cache.tables.release(name)


def test_a_miss_that_stays_above_the_limit_is_told_once(watch: BasisWatch, caplog: pytest.LogCaptureFixture):
    def warnings() -> list[Any]:
        return [record.getMessage() for record in caplog.records]

    far = 1.2 * LIMIT
    with caplog.at_level(logging.WARNING, "qkv_engine"):
        run(watch, "few", NUM_BLOCKS - 1, far)
        run(watch, "one", NUM_BLOCKS, far)
        run(watch, "own", NUM_BLOCKS, 1.0)  # begins anew
        for number in range(LEAST_STEPS // NUM_BLOCKS):
            run(watch, f"far{number}", NUM_BLOCKS, far)
        assert not warnings()
        run(watch, "more", NUM_BLOCKS, far)
        (found,) = warnings()
        run(watch, "again", LEAST_STEPS, far)
        run(watch, "again and again", LEAST_STEPS, far)
    assert warnings() == [found]
    assert "mine" in found and f"{far:.1f} times" in found and "plan --method spectral --data FILE.jsonl" in found


def test_counters_that_are_reset_do_not_hide_a_miss(watch: BasisWatch, caplog: pytest.LogCaptureFixture):
    run(watch, "before", 2 * NUM_BLOCKS, 2 * LIMIT)
    watch._cache.reset_counters()
    for number in range(1 + LEAST_STEPS // NUM_BLOCKS):
        run(watch, f"after{number}", NUM_BLOCKS, 2 * LIMIT)
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_a_plan_knows_its_own_task_from_another(tmp_path: Path):
    path = str(tmp_path / "plan.json")
    profile = ["--task", "addition:10", "--samples", "6", "--context", "100000", "--budget", "1.75bits", "--eager"]
    assert main(["plan", "--method", "spectral", *profile, "-o", path]) == 0
    misses = []
    for task in ("addition:10", "ledger:40"):
        with Engine(kv=path, kv_memory="64MiB", max_num_seqs=2) as engine:
            assert engine.stats().basis_miss is None and engine.tokenizer is not None
            texts = task_texts(engine.tokenizer, task, samples=4, max_tokens=1024, seed=5).texts
            engine.generate([list(text.token_ids) for text in texts], SamplingParams(max_tokens=4, ignore_eos=True))
            misses.append(engine.stats().basis_miss)
    assert 0.7 < misses[0] < LIMIT < misses[1]
