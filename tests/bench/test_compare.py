"""``bench --compare``: rows matched by settings, ratios and their verdicts, files that hold no rows."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from qkv_engine.bench import compare as compare_module
from qkv_engine.bench.compare import compare
from qkv_engine.bench.result_files import read_records
from qkv_engine.cli.main import main
from qkv_engine.errors import ConfigError

ROW = {"model": "demo", "kv": "bf16", "batch": 4, "input_len": 8, "output_len": 8, "commit": "abc", "status": "ok"}


def row(**values: Any) -> dict[str, Any]:
    return ROW | values


def write(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".csv":
        with path.open("w") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines) + "\n")
    return path


def verdicts(folder: Path, before: dict[str, Any], after: dict[str, Any], threshold: float = 0.05) -> dict[str, str]:
    found = compare([write(folder / "a.jsonl", row(**before)), write(folder / "b.jsonl", row(**after))], threshold)
    return {change.metric: change.verdict for change in found.changes}


@pytest.mark.parametrize(
    ("metric", "up"),
    [
        *(("output_tok_s", "better"), ("goodput", "better"), ("accuracy", "better"), ("of_limit", "better")),
        *(("ttft_ms", "worse"), ("ttft_ms_p99", "worse"), ("itl_p99_ms", "worse"), ("seconds", "worse")),
        *(("kv_bytes_peak", "worse"), ("perplexity", "worse"), ("nll", "worse")),
    ],
)
def test_more_of_a_rate_is_better_and_more_of_a_cost_worse(metric: str, up: str, tmp_path: Path) -> None:
    down = {"better": "worse", "worse": "better"}[up]
    assert verdicts(tmp_path, {metric: 100}, {metric: 106}) == {metric: up}
    assert verdicts(tmp_path, {metric: 100}, {metric: 94}) == {metric: down}
    assert verdicts(tmp_path, {metric: 100}, {metric: 104}) == {metric: "same"}
    assert verdicts(tmp_path, {metric: 100}, {metric: 94}, threshold=0.1) == {metric: "same"}


def test_counters_and_sizes_asked_for_are_no_metrics(tmp_path: Path) -> None:
    given = {"kv_bytes_total": 100, "demotions": 3, "effective_bits": 4.0, "repeats": 3}
    assert verdicts(tmp_path, given, {name: 2 * value for name, value in given.items()}) == {}


def test_metrics_that_one_row_lacks_are_left_out(tmp_path: Path) -> None:
    assert verdicts(tmp_path, {"ttft_ms": None, "tpot_ms": 5}, {"ttft_ms": 3, "tpot_ms": None}) == {}


def test_changes_within_the_spread_of_the_runs_are_none(tmp_path: Path) -> None:
    wide = {"output_tok_s": 100, "output_tok_s_min": 90, "output_tok_s_max": 110, "ttft_ms": 10}
    narrow = {"output_tok_s": 82, "output_tok_s_min": 81, "output_tok_s_max": 83, "ttft_ms": 11.8}
    assert verdicts(tmp_path, wide, narrow) == {"output_tok_s": "worse", "ttft_ms": "worse"}
    noisy = narrow | {"output_tok_s_min": 73, "output_tok_s_max": 91}
    assert verdicts(tmp_path, wide, noisy) == {"output_tok_s": "same", "ttft_ms": "same"}


def test_accuracy_has_an_interval_of_its_own(tmp_path: Path) -> None:
    steady = {"output_tok_s": 100, "output_tok_s_min": 100, "output_tok_s_max": 100}
    before = steady | {"accuracy": 0.9, "low": 0.82, "high": 0.95}
    after = steady | {"accuracy": 0.82, "low": 0.74, "high": 0.9}
    assert verdicts(tmp_path, before, after)["accuracy"] == "same"
    assert verdicts(tmp_path, before, after | {"accuracy": 0.6})["accuracy"] == "worse"


@pytest.mark.parametrize(("metric", "verdict"), [("acc,none", "better"), ("word_perplexity", "worse")])
def test_rows_of_a_named_metric(metric: str, verdict: str, tmp_path: Path) -> None:
    found = verdicts(tmp_path, {"metric": metric, "value": 0.5}, {"metric": metric, "value": 0.7})
    assert found == {metric: verdict}
    unsure = {"metric": metric, "value": 0.5, "stderr": 0.1}
    assert verdicts(tmp_path, unsure, unsure | {"value": 0.7}) == {metric: "same"}


def test_rows_match_by_settings_in_any_order_and_form(tmp_path: Path) -> None:
    rows = [row(kv=kv, batch=batch, output_tok_s=10.0 * batch) for kv in ("bf16", "int4") for batch in (1, 4)]
    doubled = [row | {"output_tok_s": 2 * row["output_tok_s"]} for row in reversed(rows)]
    for name in ("b.csv", "b.json", "b.jsonl"):
        found = compare([write(tmp_path / "a.jsonl", *rows), write(tmp_path / name, *doubled)], 0.05)
        assert [(change.row, change.ratio) for change in found.changes] == [
            *(("bf16, batch 1", 2.0), ("bf16, batch 4", 2.0), ("int4, batch 1", 2.0), ("int4, batch 4", 2.0))
        ]


def test_lengths_of_a_task_are_measured_and_no_settings(tmp_path: Path) -> None:
    before, after = {"task": "ledger", "output_len": 90, "right": 3}, {"task": "ledger", "output_len": 91, "right": 4}
    assert verdicts(tmp_path, before, after) == {"right": "better"}


def test_rows_of_equal_settings_match_one_after_another(tmp_path: Path) -> None:
    rows = [row(output_tok_s=value) for value in (10, 20)]
    found = compare([write(tmp_path / "a.json", *rows), write(tmp_path / "b.json", *rows)], 0.05)
    assert [(change.row, change.ratio) for change in found.changes] == [("bf16", 1.0), ("bf16, number 2", 1.0)]


def test_largest_batches_match_though_another_one_fits(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *(row(batch=batch, output_tok_s=batch) for batch in (8, 57)))
    second = write(tmp_path / "b.jsonl", *(row(batch=batch, output_tok_s=2 * batch) for batch in (8, 60)))
    labels = ["bf16, batch 8", "bf16, batch 57 beside 60"]
    assert [change.row for change in compare([first, second], 0.05).changes] == labels
    other = write(tmp_path / "c.jsonl", *(row(batch=batch, output_tok_s=2 * batch) for batch in (8, 64)))
    assert compare([first, other], 0.05).missing == ["bf16, batch 57"]


def test_the_nearest_batch_matches_among_very_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(compare_module, "abs", lambda x: looked.append(x) or abs(x), raising=False)
    before = [row(batch=10 * i, output_tok_s=1) for i in range(1, 6_001)]
    after = [row(batch=10 * i + 1, output_tok_s=1) for i in range(6_000, 0, -1)]  # pair by pair this takes minutes
    found = compare([write(tmp_path / "a.jsonl", *before), write(tmp_path / "b.jsonl", *after)], 0.05)
    assert not found.missing and len(found.changes) == 6_000
    assert 6_000 <= len(looked) < 100 * 6_000  # of 36 million pairs
    assert found.changes[0].row == "bf16, batch 10 beside 11"
    assert found.changes[-1].row == "bf16, batch 60000 beside 60001"


@pytest.mark.parametrize(
    "values",
    [
        {"output_tok_s": 10**309},
        {"output_tok_s": "x", "output_tok_s_min": 1, "output_tok_s_max": 2},
        {"output_tok_s": [1], "output_tok_s_min": 1, "output_tok_s_max": 2},
        {"output_tok_s": 1e308, "output_tok_s_min": -1e308, "output_tok_s_max": 10**308},
        {"output_tok_s": 1, "output_tok_s_min": 10**400, "output_tok_s_max": 2},
        {"metric": "ttft_ms", "value": "x", "stderr": 1.0},
        {"metric": "ttft_ms", "stderr": 1.0},
        {"metric": "acc", "value": 5e-324, "stderr": 1e308},
        {"batch": 10**400},
        {"accuracy": {"x": 1}, "low": 1, "high": 2},
        {"seconds": 5e-324},
    ],
)
def test_values_that_are_no_measured_numbers_break_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    given = {"ttft_ms": 3, "itl_ms": 2, "seconds": 10**308}
    for before, after in ((values, {}), ({}, values), (values, values)):
        first, second = (
            write(tmp_path / "a.jsonl", row(**given | before)),
            write(tmp_path / "b.jsonl", row(**given | after)),
        )
        try:
            found = compare([first, second], 0.05)
        except ConfigError as error:
            assert "has no row in common" in str(error)
        else:
            assert any(change.metric == "itl_ms" for change in found.changes) or "metric" in values


def test_rows_without_any_metric_make_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "a.jsonl", row()))
    assert main(["bench", "--compare", file, file]) == 0
    assert "better" in capsys.readouterr().out


def test_rows_of_one_file_and_other_origins_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *(row(batch=batch, output_tok_s=9) for batch in (1, 2, 4)))
    failed = row(batch=2, status="failed", output_tok_s=None)
    second = write(tmp_path / "b.jsonl", row(batch=1, output_tok_s=9, commit="def"), failed, row(batch=8))
    found = compare([first, second], 0.05)
    notes = "\n".join(found.table.notes)
    assert f"only in {first}: bf16, batch 2; bf16, batch 4" in notes and f"only in {second}: bf16, batch 8" in notes
    assert f"{second}: commit abc -> def" in notes and "seed" not in notes
    assert found.missing == ["bf16, batch 2", "bf16, batch 4"] and found.has_regressed


def test_from_zero_there_is_no_ratio(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", row(kv_bytes_meta=value)) for name, value in (("a", 0), ("b", 7))]
    (change,) = compare(paths, 0.05).changes
    assert (change.ratio, change.verdict) == (None, "worse")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("b.txt", "", "its suffix names no form of rows"),
        ("b.json", "[{", "cannot be read: "),
        ("b.json", "[" * 100_000, "cannot be read: "),
        ("b.jsonl", '{"kv": "bf16"}\nbatch\n', "cannot be read: "),
        ("b.jsonl", '{"kv": "bf16"}\n[1]\n', "row 2 is none of a benchmark"),
        ("b.json", '{"versions": {}}', "row 1 is none of a benchmark"),
        ("b.csv", "kv,batch\nbf16,1,2\n", "row 1 is none of a benchmark"),
        ("b.csv", "kv,batch\n", "holds no rows"),
        ("b.csv", "\udcff", "cannot be read: "),
        ("b.jsonl", '{"kv": "int4", "model": "demo"}', "has no row in common with "),
    ],
)
def test_files_that_cannot_be_compared(name: str, text: str, problem: str, tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", row()), tmp_path / name
    second.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=problem) as caught:
        compare([first, second], 0.05)
    assert (caught.value.field, caught.value.value) == ("compare", str(second))


def test_empty_cells_of_csv_are_none_and_numbers_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"kv": "bf16", "batch": 4, "ttft_ms": 1.5, "detail": None})
    assert read_records(path, field="compare") == [{"kv": "bf16", "batch": 4, "ttft_ms": 1.5, "detail": None}]


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--fail-on-regression"], 1)])
def test_command(words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / f"{value}.jsonl", row(output_tok_s=value, ttft_ms=1)) for value in (100, 80)]
    assert main(["bench", "--compare", *map(str, paths), *words]) == code
    out = capsys.readouterr().out
    assert "▼ 0.80x" in out and "equal: ttft_ms" in out
    assert main(["bench", "--compare", *map(str, paths), *words, "--threshold", "25%", "-o", "json"]) == 0
    assert {change["verdict"] for change in json.loads(capsys.readouterr().out)} == {"same"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--compare", "b.json"], "--compare"),
        (["--compare", "a", "b", "--threshold", "x"], "--threshold"),
        (["--threshold", "5%"], "--threshold='5%': needs --compare"),
        (["--fail-on-regression"], "--fail-on-regression: needs --compare"),
    ],
)
def test_usage(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert named in capsys.readouterr().err
