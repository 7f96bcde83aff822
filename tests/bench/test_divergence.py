"""``eval --divergence``: rows, intervals and pairs, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv_engine import ConfigError, Engine
from qkv_engine.bench.divergence import (
    DivergencePlan,
    bootstrap,
    changed_of,
    closer,
    divergence_table,
    kl_of,
    measure_divergence,
    nats,
    nll_of,
)
from qkv_engine.bench.forced import TextScore
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.cli.main import main

SCORES = [TextScore(10, 1.0, 2, 5.0, False), TextScore(30, 0.0, 1, 0.0, True)]


def test_a_set_counts_its_tokens_and_sets_count_alike() -> None:
    assert kl_of(SCORES).mean == 1 / 40 and changed_of(SCORES).mean == 3 / 40 and nll_of(SCORES) == 5 / 40
    other = [TextScore(10, 2.0, 0, 0.0, True)] * 9
    assert kl_of(SCORES, other).mean == pytest.approx((1 / 40 + 0.2) / 2)
    assert kl_of(other) == pytest.approx((0.2, 0.2, 0.2))
    mean, low, high = kl_of(SCORES)
    assert low == 0 < mean < high == pytest.approx(0.1) and kl_of(SCORES) == (mean, low, high)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    import random

    rng, held = random.Random(0), 0
    for _ in range(200):
        texts = [(rng.gauss(5, 2), 5) for _ in range(40)]
        found = bootstrap(texts)
        held += found.low <= 1.0 <= found.high
    assert 178 <= held <= 199


def test_texts_that_diverge_less_are_better() -> None:
    assert closer(SCORES, [SCORES[1]] * 2)[:2] == (0, 1)
    assert closer([SCORES[1]] * 2, SCORES)[:2] == (1, 0)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (1.234, "1.23"), (0.0123, "0.012"), (0.0000181, "0.000018"), (0.0, "<0.000001"), (-1e-9, "<0.000001")],
)
def test_nats_have_two_digits(value: float | None, shown: str) -> None:
    assert nats(value) == shown


def test_rows_of_presets() -> None:
    tasks = parse_tasks("lookup:40,chat:20", samples=3, seed=4)
    plan = DivergencePlan(model="demo", kvs=("bf16", "int4", "kivi-2"), tasks=tasks, seed=4)
    rows = list(measure_divergence(plan, lambda kv: Engine(kv=kv, kv_memory="48MiB", prefix_caching=False)))
    assert [(row.kv, row.task, row.size, row.texts, row.status) for row in rows] == [
        (kv, task, size, 3, "ok") for kv in plan.kvs for task, size in (("lookup", 40), ("chat", 20))
    ]
    first, int4, kivi = rows[::2]
    assert (first.kl, first.changed, first.better, first.reference) == (None, None, None, "bf16")
    assert first.exact == 3 and first.nll < 0.1
    assert int4.kl_low <= int4.kl <= int4.kl_high < kivi.kl and int4.changed == 0
    assert (int4.better, kivi.better + kivi.worse) == (None, 3)
    assert (first.block_bits, int4.lowest_bits, kivi.lowest_bits) == (16, 4, 2)
    assert int4.block_bits == pytest.approx(4.28, abs=0.01) and int4.block_bits < int4.effective_bits < 16
    assert first.tokens == int4.tokens == kivi.tokens
    table = divergence_table(rows)
    assert table.title.endswith("teacher forcing, divergence from bf16")
    assert [row[:3] for row in table.cells[:2]] == [["lookup", "40", "bf16"], ["lookup", "40", "int4"]]
    assert {"KL, nats", "first choice changed", "vs row above, p", "bits a block", "bits held"} <= set(table.headers)


def test_a_reference_that_failed_leaves_the_others_without_one() -> None:
    tasks = parse_tasks("lookup:9", samples=1)
    plan = DivergencePlan(model="demo", kvs=("bf16", "int4"), tasks=tasks)
    limits = {"bf16": 16, "int4": 512}

    def open_engine(kv: str) -> Engine:
        return Engine(kv=kv, kv_memory="48MiB", max_model_len=limits[kv], prefix_caching=False)

    first, second = measure_divergence(plan, open_engine)
    assert first.status == second.status == "failed"
    assert "bf16, the reference, was not measured" in (second.detail or "")


def test_the_command_reads_lines_of_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    lines = [{"text": "Sort: 5 99 23 11. " * 9}, {"prompt": "What is 47*86?", "answer": "4042"}, {"text": "hi"}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--divergence", "--data", str(data), "--kv", "bf16,kivi-2", "--kv-memory", "48MiB", "--samples", "2"]
    assert main(["eval", *words, "-o", "json"]) == 0
    wide, narrow = json.loads(capsys.readouterr().out)
    assert (narrow["task"], narrow["size"], narrow["texts"], narrow["reference"]) == ("mine", None, 2, "bf16")
    assert narrow["tokens"] == wide["tokens"] > 40 and narrow["kl"] is not None and wide["kl"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv", "int4"], "nothing to compare with. Give a list, the reference first, such as bf16,int4"),
        (["--kv", "bf16,int4", "--max-tokens", "9"], "--max-tokens=9: cannot be combined with --divergence"),
        (["--kv", "bf16,int4", "--log-samples", "a.jsonl"], "cannot be combined with --divergence"),
        (["--kv", "bf16,int4", "--perplexity", "a.txt"], "cannot be combined with --divergence"),
        (["--kv", "bf16,int4", "--samples", "0"], "--samples=0: must be at least 1"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--divergence", "--kv-memory", "48MiB", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_plan_needs_something_to_compare() -> None:
    with pytest.raises(ConfigError, match="such as bf16,int4"):
        DivergencePlan(model="demo", kvs=("bf16",))
