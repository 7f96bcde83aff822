"""Forms of output parse back, tables say what matters, files are written whole or not at all."""

import csv
import io
import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from qkv_engine import KVConfig
from qkv_engine.bench.forms import FORMATS, SUFFIXES, format_of
from qkv_engine.bench.report import render, sweep_table, unfilled_notes, workload_table
from qkv_engine.bench.sweep import SweepRow
from qkv_engine.errors import ConfigError
from qkv_engine.presets import PRESETS

from .fake import make_row

NO_FIT = dict.fromkeys(("output_tok_s", "output_tok_s_min", "output_tok_s_max", "decode_tok_s", "ttft_ms"))
ROWS = [
    make_row(),
    make_row(batch=2, output_tok_s=1800.0),
    make_row(kv="int4", output_tok_s=1500.0, kv_bytes_codes=2**18, kv_bytes_meta=2**12, demotions=7),
    make_row(kv="int4", batch=2, status="does not fit", detail='needs 2 GiB, has "1" | 0', repeats=0, **NO_FIT),
]


def text(kind: str) -> str:
    return render(kind, ROWS, sweep_table(ROWS))


def test_json_and_json_lines_parse_back() -> None:
    expected = [asdict(row) for row in ROWS]
    assert json.loads(text("json")) == expected
    assert [json.loads(line) for line in text("jsonl").splitlines()] == expected


def test_csv_parses_back() -> None:
    parsed = list(csv.DictReader(io.StringIO(text("csv"))))
    assert list(parsed[0]) == [field.name for field in fields(SweepRow)]
    for found, row in zip(parsed, ROWS, strict=True):
        assert found == {name: "" if value is None else str(value) for name, value in asdict(row).items()}


def test_markdown_is_one_table() -> None:
    lines = [line for line in text("md").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len(cells) == 2 + len(ROWS)
    assert len({len(row) for row in cells}) == 1
    assert dict(zip(cells[0], cells[3], strict=True))["out tok/s"] == "1,800.0"


def test_not_a_number_is_refused() -> None:
    row = make_row(ttft_ms=float("nan"))
    with pytest.raises(ValueError):
        render("json", [row], sweep_table([row]))


def test_columns_of_the_design_are_there() -> None:
    wanted = "model kv batch input_len output_len output_tok_s total_tok_s ttft_ms tpot_ms itl_ms kv_bytes_peak "
    wanted += (
        "kv_bytes_codes kv_bytes_meta kv_bytes_dense kv_bytes_state effective_bits demotions preemptions status repeats"
    )
    assert set(wanted.split()) <= {field.name for field in fields(SweepRow)}


def test_states_are_a_part_of_the_peak() -> None:
    table = sweep_table([make_row(kv_bytes_state=2**19)])
    assert table.cells[0][table.headers.index("states")] == "512.0 KiB"
    assert "states" not in sweep_table([make_row(kv_bytes_state=0)]).headers


def test_table_compares_with_the_first_preset_at_equal_batch() -> None:
    table = sweep_table(ROWS)
    assert [row[table.headers.index("vs bf16")] for row in table.cells] == ["1.00x", "1.00x", "1.50x", ""]


def test_table_is_humanised_and_leaves_empty_columns_out() -> None:
    table = sweep_table(ROWS)
    first = dict(zip(table.headers, table.cells[0], strict=True))
    assert (first["KV peak"], first["±"], first["out tok/s"]) == ("1.0 MiB", "1.0%", "1,000.0")
    assert "preemptions" not in table.headers and "demotions" in table.headers
    assert "status" not in sweep_table(ROWS[:2]).headers
    assert not any(header.startswith("vs") for header in sweep_table(ROWS[:2]).headers)
    assert table.title == "demo · cpu, 2 threads · float32 · 16 in, 8 out · median of 3 runs"


def test_table_gives_each_reason_once() -> None:
    bad = [make_row(batch=batch, status="failed", detail="lost") for batch in (1, 2)]
    assert sweep_table(bad).notes == ["bf16 1, bf16 2 failed: lost"]


def test_table_text_is_aligned_and_plain() -> None:
    lines = text("table").splitlines()
    assert lines[0].startswith("demo")
    assert "\x1b" not in text("table")
    header = next(line for line in lines if "TTFT ms" in line)
    body = [line for line in lines if line.startswith(("bf16  ", "int4  "))]
    assert len(body) == len(ROWS)
    assert all(line.rstrip()[: header.index("out tok/s") + 9].endswith(("0.0", "  ")) for line in body[:3])


def test_markup_in_a_name_is_text() -> None:
    row = make_row(model="[red]x[/red]", kv="[b]")
    assert "[red]x[/red]" in render("table", [row], sweep_table([row]))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_ends_with_a_newline(kind: str) -> None:
    assert text(kind).endswith("\n") and not text(kind).endswith("\n\n")


def test_rows_say_where_they_come_from() -> None:
    wanted = "engine_version torch_version date device device_name threads dtype seed kv_bytes_total"
    assert set(wanted.split()) <= {field.name for field in fields(SweepRow)}


def test_a_task_is_in_the_title_and_lengths_are_averages() -> None:
    rows = [make_row(task="ledger 100", repeats=1, input_len=2012, output_len=800)]
    assert "ledger 100 · 2,012 in, 800 out on average · KV memory 4.0 MiB" in workload_table(rows).title


@pytest.mark.parametrize(("kv", "tokens"), [("int8", 160), ("int4", 160), ("kivi-4", 256)])
def test_an_eager_preset_that_filled_no_block_says_so(kv: str, tokens: int) -> None:
    (note,) = sweep_table([make_row(), make_row(kv=kv)]).notes
    assert note == f"{kv}: no block was filled, which takes {tokens} tokens of context: all KV stayed at 16 bits"


def test_a_preset_that_never_ran_short_says_so() -> None:
    (note,) = workload_table([make_row(kv="auto", task="ledger 2")]).notes
    assert note == "auto: memory was never short, or contexts stayed under 160 tokens: all KV stayed at 16 bits"


def test_a_ladder_of_ones_own_says_so_too() -> None:
    mine = KVConfig(name="mine", rungs=PRESETS["int4"].rungs, recent_ratio=0.5, eager=True)
    (note,) = sweep_table([make_row(kv="mine")], {"mine": mine}).notes
    assert note.startswith("mine: no block was filled, which takes 255 tokens")


def test_presets_of_one_reason_share_a_line_and_those_that_stepped_down_are_quiet() -> None:
    rows = [make_row(kv=kv, batch=batch) for kv in ("int8", "int4", "bf16", "somebody's") for batch in (1, 2)]
    rows += [make_row(kv="kivi-2", demotions=1), make_row(kv="kivi-2", batch=2)]
    (note,) = unfilled_notes(rows, [row.kv for row in rows])
    assert note.startswith("int8, int4: no block")
    missing = make_row(kv="int4", status="does not fit", demotions=None)
    assert unfilled_notes([missing], ["int4"]) == []


def test_a_suffix_names_the_form() -> None:
    assert {format_of(Path(f"rows{suffix.upper()}"), "md") for suffix in SUFFIXES} == set(FORMATS)
    assert format_of(Path("/dev/stdout"), "md") == "md"
    with pytest.raises(ConfigError, match=r"output='x.tar.gz': .gz is no known form.*\.json, .*\.csv"):
        format_of(Path("x.tar.gz"), "md")
