"""Tables of measured rows in the pages are those of the files in results/, whose commands parse."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qkv_engine.cli import bench
from qkv_engine.cli.combinations import check_combinations
from qkv_engine.cli.main import _parse

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = {
    **{"commit": "abc1234", "torch_version": "2.13", "date": "2026-11-22T10:00:00+00:00", "device": "cuda:0"},
    **{"device_name": "NVIDIA H200", "command": "qkv-engine bench --kv bf16 --output a/b.jsonl --plot c.png"},
}
ROW = {**ORIGIN, "model": "demo", "kv": "bf16", "batch": 4, "input_len": 8, "output_len": 8, "status": "ok"}
TASK = {**ORIGIN, "model": "demo", "task": "lookup", "size": 9, "kv": "int4", "samples": 3, "status": "ok"}


@pytest.fixture(scope="module")
def make_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs/make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(module: ModuleType, folder: Path, columns: str, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = f"text\n<!-- results rows.jsonl{columns} -->\nold\n<!-- end -->\n<!-- results later -->\n"
    found = module.fill(page, folder)
    assert module.fill(found, folder) == found
    assert (
        found.startswith("text\n") and found.endswith("<!-- end -->\n<!-- results later -->\n") and "old" not in found
    )
    return str(found)


def test_pages_are_up_to_date(make_tables: ModuleType) -> None:
    pages = {path: path.read_text() for path in make_tables.PAGES}
    stale = [path.name for path, page in pages.items() if make_tables.fill(page) != page]
    assert not stale, "run python docs/make_tables.py"
    assert any(make_tables.SECTION.search(page) for page in pages.values())


def test_tables_are_those_that_the_commands_print(make_tables: ModuleType, tmp_path: Path) -> None:
    rates = {"repeats": 1, "output_tok_s": 1234.5, "kv_bytes_peak": 2**20}
    assert "| bf16 |     4 |   1,234.5 |" in filled(make_tables, tmp_path, "", ROW | rates)
    counts = {"task": "ledger 9", "finished": 4, "right": 3}
    assert "| requests | finished | right |" in filled(make_tables, tmp_path, "", ROW | rates | counts)
    assert "| lookup |    9 | int4 |" in filled(make_tables, tmp_path, "", TASK | {"right": 2, "accuracy": 0.67})


LOAD = {"rate": "8", "requests": 4, "seconds": 1.5, "output_tok_s": 99.0, "ttft_ms_p50": 1.0}
RATED = {"eval_model": "demo", "eval_tasks": "lookup 9", "answers": 4, "accuracy": 0.75}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (ROW | RATED, ["| kv   | batch | right |", "| 75.0% |", "right: mean of lookup 9"]),
        (ROW | RATED | {"kv": "a-plan"}, ["| a-plan |"]),
        (ROW | {"preset": "kivi"}, ["KIVI, prompts as of ShareGPT, scaled down", "| published "]),
        (ROW | RATED | {"capacity_tokens": 12_345}, [" 12,345 |"]),
        (
            {key: value for key, value in ROW.items() if key != "batch"} | LOAD,
            ["| kv   | rate |", " 99.0 |", "4 requests"],
        ),
        (
            {**ORIGIN, "model": "demo", "text": "a.txt", "kv": "int4", "context": 64, "stride": 32, "perplexity": 7.25}
            | {"status": "ok"},
            ["|     7.2500 |", "windows of 64 tokens"],
        ),
        (
            {**ORIGIN, "model": "demo", "task": "arc", "kv": "int4", "metric": "acc", "value": 0.5, "status": "ok"},
            ["| arc  | acc    | int4 | 0.5000 |"],
        ),
    ],
)
def test_every_kind_of_rows_has_its_tables(
    row: dict[str, Any], shown: list[str], make_tables: ModuleType, tmp_path: Path
) -> None:
    found = filled(make_tables, tmp_path, "", row)
    assert [text for text in shown if text not in found] == []


def test_chosen_columns_and_the_origin_below_them(make_tables: ModuleType, tmp_path: Path) -> None:
    rows = [ROW | {"ttft_ms": 1.234, "kv_bytes_peak": 2**21, "accuracy": 0.5}, ROW | {"commit": "def5678+"}]
    found = filled(make_tables, tmp_path, ": kv, batch, ttft_ms, kv_bytes_peak, accuracy", *rows)
    assert re.search(r"\| bf16 +\| +4 \| +1.23 \| +2.0 MiB \| +50.0% \|", found)
    assert "demo · NVIDIA H200\n" in found
    origin = (
        "`qkv-engine bench --kv bf16` · `results/rows.jsonl` · 2026-11-22 · commit abc1234 and def5678+ · torch 2.13\n"
    )
    assert origin in found


@pytest.mark.parametrize(("columns", "row"), [(": kv, speed", ROW), ("", ROW | {"rate": 3})])
def test_unknown_columns_and_kinds_are_errors(
    columns: str, row: dict[str, Any], make_tables: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="column"):
        filled(make_tables, tmp_path, columns, row)


@pytest.mark.parametrize("target", ["bench-cpu", "bench-gpu"])
def test_commands_of_the_makefile_parse_and_write_results(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = re.sub(r"\\\n\s*", "", done.stdout).splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith(".venv/bin/qkv-engine ")]
    assert len(commands) >= 3
    parsed = [_parse(words) for words in commands]
    for args in (args for args in parsed if args.run is bench.run):
        check_combinations(args, excluded=bench.EXCLUDED, needed=bench.NEEDED)
    files = [args.output for args in parsed if args.output.suffix != ".json"]  # of which plans are
    assert len(set(files)) == len(files) and all(file.suffix == ".jsonl" for file in files)
