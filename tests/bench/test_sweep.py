"""The sweep over a fake engine with exact times: rows, what does not fit, what fails, what interrupts."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest

from qkv_engine import __version__
from qkv_engine.bench.batches import parse_batches
from qkv_engine.bench.provenance import cpu_name
from qkv_engine.bench.runs import ordinary_tokens, random_prompts
from qkv_engine.bench.sweep import SweepPlan, SweepRow, sweep
from qkv_engine.bench.watch import Work, work_of
from qkv_engine.errors import CapacityError, ConfigError, EngineDeadError, ModelError
from qkv_engine.request import SamplingParams

from .fake import BLOCK, FakeEngine


def plan(**values: object) -> SweepPlan:
    defaults = {"model": "demo", "kvs": ("bf16",), "batches": (1, 4), "input_len": 16, "output_len": 11}
    return SweepPlan(**defaults | {"repeats": 2, "warmup": 1} | values)


def rows_of(plan: SweepPlan, engine: FakeEngine) -> list[SweepRow]:
    return list(sweep(plan, lambda kv: engine, clock=engine.clock))


def test_figures_are_exact() -> None:
    row = rows_of(plan(), FakeEngine())[1]
    seconds = 0.05 + 10 * 0.01
    assert (row.model, row.device, row.dtype, row.kv, row.batch) == ("demo", "cpu", "float32", "bf16", 4)
    assert row.output_tok_s == pytest.approx(4 * 11 / seconds, abs=1e-3)
    assert row.output_tok_s_min == row.output_tok_s == row.output_tok_s_max
    assert row.total_tok_s == pytest.approx(4 * (16 + 11) / seconds, abs=1e-3)
    assert row.decode_tok_s == pytest.approx(4 / 0.01, abs=1e-3)
    assert row.ttft_ms == pytest.approx(50)
    assert row.tpot_ms == row.itl_ms == row.itl_p99_ms == pytest.approx(10)
    assert (row.status, row.detail, row.repeats, row.max_running) == ("ok", None, 2, 4)


def test_memory_is_that_of_the_run() -> None:
    row = rows_of(plan(), FakeEngine())[1]
    assert row.kv_bytes_peak == 4 * BLOCK
    assert row.kv_bytes_codes + row.kv_bytes_meta + row.kv_bytes_dense == row.kv_bytes_peak
    assert (row.kv_bytes_total, row.effective_bits, row.demotions, row.preemptions) == (64 * BLOCK, 4.5, 3, 0)


def test_every_run_has_new_prompts_of_the_exact_length() -> None:
    engine = FakeEngine()
    rows_of(plan(batches=(3,)), engine)
    runs = [tuple(map(tuple, run)) for run in engine.prompts]
    assert len(runs) == len(set(runs)) == 3  # warm-up and two repeats
    assert {len(prompt) for run in runs for prompt in run} == {16}


def test_prompts_depend_on_the_seed_alone_and_hold_no_special_token() -> None:
    tokens = ordinary_tokens(FakeEngine())
    prompts = random_prompts(tokens, 20, 100, "a")
    assert prompts == random_prompts(tokens, 20, 100, "a") != random_prompts(tokens, 20, 100, "b")
    assert {token for prompt in prompts for token in prompt} == set(range(3, FakeEngine.vocab_size))


def test_a_model_without_a_tokenizer_has_no_special_tokens() -> None:
    assert ordinary_tokens(FakeEngine(tokenizer=None)) == list(range(FakeEngine.vocab_size))


def test_presets_run_one_after_another() -> None:
    engines: dict[str, FakeEngine] = {}

    def open_engine(kv: str) -> FakeEngine:
        assert all(engine.closed for engine in engines.values())
        return engines.setdefault(kv, FakeEngine())

    rows = list(sweep(plan(kvs=("bf16", "fp32")), open_engine))
    assert [(row.kv, row.batch) for row in rows] == [("bf16", 1), ("bf16", 4), ("fp32", 1), ("fp32", 4)]
    assert all(engine.closed == 1 for engine in engines.values())


def test_a_preset_may_have_batches_of_its_own() -> None:
    own = plan(kvs=("bf16", "int4"), own_batches={"int4": (1, 9)})
    rows = list(sweep(own, lambda kv: FakeEngine()))
    assert [(row.kv, row.batch) for row in rows] == [("bf16", 1), ("bf16", 4), ("int4", 1), ("int4", 9)]
    assert own.num_rows == len(rows)


def test_a_batch_that_runs_part_after_part_says_so() -> None:
    row = rows_of(plan(), FakeEngine(slots=3))[1]
    assert (row.status, row.max_running) == ("queued", 3)
    assert row.detail == "at most 3 requests ran at once: memory was full, or the first ended before the last began"
    assert row.decode_tok_s is None
    assert "3 requests" in row.detail


def test_a_size_that_does_not_fit_is_a_row_and_the_next_is_measured() -> None:
    rows = rows_of(plan(batches=(1, 4, 8)), FakeEngine(raises={4: CapacityError("too long for 1 MiB")}))
    assert [row.status for row in rows] == ["ok", "does not fit", "ok"]
    assert rows[1].detail == "too long for 1 MiB"
    assert rows[1].output_tok_s is None and rows[1].repeats == 0


def test_an_engine_that_does_not_fit_is_opened_once() -> None:
    opened = []

    def open_engine(kv: str) -> FakeEngine:
        opened.append(kv)
        if kv == "fp32":
            raise CapacityError("no room for one block")
        return FakeEngine()

    rows = list(sweep(plan(kvs=("fp32", "bf16")), open_engine))
    assert [row.status for row in rows] == ["does not fit", "does not fit", "ok", "ok"]
    assert opened == ["fp32", "bf16"]


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (EngineDeadError("lost"), "lost"),
        (MemoryError(), "MemoryError: "),
    ],
)
def test_after_a_failure_the_next_size_gets_a_new_engine(error: Exception, detail: str) -> None:
    engines: list[FakeEngine] = []

    def open_engine(kv: str) -> FakeEngine:
        engines.append(FakeEngine(raises={4: error}))
        return engines[-1]

    rows = list(sweep(plan(batches=(1, 4, 8)), open_engine))
    assert [row.status for row in rows] == ["ok", "failed", "ok"]
    assert rows[1].detail == detail
    assert [engine.closed for engine in engines] == [1, 1]


@pytest.mark.parametrize("error", [ConfigError("unknown dtype"), ModelError("no such model")])
def test_what_no_size_would_cure_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        rows_of(plan(), FakeEngine(raises={1: error}))


def test_a_short_output_is_a_failure() -> None:
    row = rows_of(plan(), FakeEngine(tokens_short=1))[0]
    assert row.status == "failed"
    assert "10 of 11 tokens" in row.detail


def test_an_interrupt_leaves_the_rows_and_closes_the_engine() -> None:
    engine = FakeEngine(raises={4: KeyboardInterrupt()})
    rows = []
    with pytest.raises(KeyboardInterrupt):
        for row in sweep(plan(), lambda kv: engine):
            rows.append(row)
    assert [row.batch for row in rows] == [1]
    assert engine.closed == 1


def test_every_run_can_be_watched() -> None:
    seen: list[Work] = []

    def watch(work: Work, engine: object) -> AbstractContextManager[None]:
        seen.append(work)
        return nullcontext()

    list(sweep(plan(), lambda kv: FakeEngine(), watch=watch))
    assert seen == [Work("bf16, batch 1", 1, 16, 11, 1 / 3)] * 3 + [Work("bf16, batch 4", 4, 64, 44, 1 / 3)] * 3


@pytest.mark.parametrize(
    ("counts", "done"),
    [
        ((0, 0, 0, 0), 0),
        ((1, 0, 0, 0), 0.25),
        ((1, 1, 160, 0), 0.5),
        ((0, 0, 160, 0), 0.25),
        ((0, 0, 320, 10), 0.75),
        ((0, 0, 900, 0), 0.5),  # recomputed prompts are no progress
        ((0, 0, 900, 90), 1),
    ],
)
def test_how_far_work_is(counts: tuple[int, int, int, int], done: float) -> None:
    names = ("num_finished", "num_failed", "prompt_tokens", "generation_tokens")
    stats = SimpleNamespace(**dict(zip(names, counts, strict=True)))
    assert Work("", 4, 320, 20).done(stats) == pytest.approx(done)


def test_work_of_one_and_of_several_parameters() -> None:
    params = SamplingParams(max_tokens=10)
    assert work_of("a", [[1, 2], [3]], params) == Work("a", 2, 3, 20)
    assert work_of("a", [[1, 2], [3]], [params, SamplingParams(max_tokens=5)], 0.5) == Work("a", 2, 3, 15, 0.5)


def test_rows_say_where_they_come_from() -> None:
    ran, missing = rows_of(plan(seed=7), FakeEngine(raises={4: CapacityError("no room")}))
    assert (ran.device, ran.device_name, ran.seed, ran.engine_version) == ("cpu", cpu_name(), 7, __version__)
    assert (missing.device, missing.seed, missing.engine_version) == (None, 7, __version__)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1,2,4", (1, 2, 4)),
        ("8", (8,)),
        ("1..64", (1, 2, 4, 8, 16, 32, 64)),
        ("1..48", (1, 2, 4, 8, 16, 32, 48)),
        ("3..20", (3, 6, 12, 20)),
        ("5..5", (5,)),
        (" 1 , 4 .. 8 ", (1, 4, 8)),
        ("4,1..4", (4, 1, 2)),
    ],
)
def test_batch_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_batches(text) == sizes


@pytest.mark.parametrize(
    ("text", "largest", "sizes"),
    [("max", 7, (7,)), ("8,max", 7, (8, 7)), ("1..max", 7, (1, 2, 4, 7)), ("8..max", 7, (7,)), ("max", 0, (1,))],
)
def test_the_largest_batch(text: str, largest: int, sizes: tuple[int, ...]) -> None:
    assert parse_batches(text, largest) == sizes


@pytest.mark.parametrize(
    "text", ["max", "1..max", "max..9", "", "0", "1,", "-1", "a", "4..1", "0..4", "1..", "1...4", "1-4", "9999999", "١"]
)
def test_what_is_no_list_of_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="batch_sweep"):
        parse_batches(text)


@pytest.mark.parametrize("name", ["input_len", "output_len", "repeats"])
def test_lengths_and_repeats_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        plan(**{name: 0})
