"""Forms of output parse back, tables say what matters, files are written whole or not at all."""

import csv
import io
import json
import os
import stat
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from qkv_engine.bench.report import FORMATS, render, sweep_table, write_file
from qkv_engine.bench.sweep import Row

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
    assert list(parsed[0]) == [field.name for field in fields(Row)]
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
    wanted += "kv_bytes_codes kv_bytes_meta kv_bytes_dense effective_bits demotions preemptions status repeats"
    assert set(wanted.split()) <= {field.name for field in fields(Row)}


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
    assert table.title == "demo · cpu · float32 · 16 in, 8 out · median of 3 runs"


def test_table_gives_each_reason_once() -> None:
    bad = [make_row(batch=batch, status="failed", detail="lost") for batch in (1, 2)]
    assert sweep_table(bad).notes == ["bf16 1, bf16 2 failed: lost"]


def test_table_text_is_aligned_and_plain() -> None:
    lines = text("table").splitlines()
    assert lines[0].startswith("demo")
    assert "\x1b" not in text("table")
    header = next(line for line in lines if "TTFT ms" in line)
    body = [line for line in lines if line.startswith((" bf16", " int4"))]
    assert len(body) == len(ROWS)
    assert all(line.rstrip()[: header.index("out tok/s") + 9].endswith(("0.0", "  ")) for line in body[:3])


def test_markup_in_a_name_is_text() -> None:
    row = make_row(model="[red]x[/red]", kv="[b]")
    assert "[red]x[/red]" in render("table", [row], sweep_table([row]))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_ends_with_a_newline(kind: str) -> None:
    assert text(kind).endswith("\n") and not text(kind).endswith("\n\n")


def test_a_file_is_replaced_and_no_draft_is_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0o666 & ~_umask() & 0o077


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_file(Path("/dev/full"), b"x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
