"""Tables fit a terminal by leaving columns out and saying which; no number is ever shortened or broken."""

import re
from itertools import pairwise
from operator import itemgetter

import pytest
from rich.cells import cell_len

from qkv_engine.bench.accuracy import AccuracyRow, accuracy_table
from qkv_engine.bench.arrivals_report import arrivals_tables
from qkv_engine.bench.arrivals_row import ArrivalsRow
from qkv_engine.bench.report import sweep_table, workload_table
from qkv_engine.bench.table import Column, Table, as_listing, as_markdown, as_text, from_rows, wrapped

from .fake import make_row

MIXED = [
    make_row(kv=kv, batch=batch, kv_bytes_codes=3 * 2**20, kv_bytes_meta=2**18, demotions=1234, preemptions=7, **more)
    for kv in ("bf16", "kivi-2")
    for batch, more in (
        (1, {"output_tok_s": 123_456.7, "ttft_ms": 12_345.6, "device_name": "AMD EPYC 7763 64-Core Processor"}),
        (1024, {"status": "queued", "detail": "at most 100 requests ran at once", "kv_bytes_peak": 1023 * 2**20}),
    )
]
ASKED = [
    make_row(task="ledger 100", kv=kv, batch=2000, finished=2000, right=1999, same=1998, seconds=12345.6, repeats=1)
    for kv in ("bf16", "auto")
]
GRADED = [
    AccuracyRow(
        model="demo",
        task=task,
        size=size,
        kv=kv,
        samples=1000,
        right=999,
        accuracy=0.999,
        low=0.9944,
        high=0.9998,
        same=998,
        cut=3,
        effective_bits=10.79,
        lowest_bits=4,
        output_tokens=123_456,
        demotions=4321,
        preemptions=12,
        seconds=1234.5,
        status="ok",
    )
    for task, size in (("multiplication", 12), ("my-questions", None))
    for kv in ("bf16", "int4")
]
LATENCIES = dict.fromkeys(
    (f"{name}_ms_p{percent}" for name in ("ttft", "tpot", "itl", "e2e") for percent in (50, 90, 99)), 12_345.6
)
STEPS = {
    f"{kind}{part}": value
    for kind in ("decode_steps", "decode_steps_demoting", "mixed_steps", "mixed_steps_demoting")
    for part, value in (("", 1531), ("_ms_p50", 23.4), ("_ms_p99", 123.4))
}
ARRIVED = [
    ArrivalsRow(
        model="qwen3-8b",
        kv=kv,
        rate="100",
        requests=10_000,
        input_len=2048,
        output_len=192,
        finished=10_000,
        seconds=1234.5,
        output_tok_s=12_345.6,
        requests_s=12.34,
        limits="ttft:1000",
        goodput=10.12,
        max_running=1024,
        max_waiting=1024,
        preemptions=12,
        demotions=11_872,
        lowest_bits=4,
        effective_bits=6.05,
        kv_bytes_total=12 * 2**30,
        kv_bytes_peak=1023 * 2**20,
        status="ok",
        **LATENCIES,
        **STEPS,
    )
    for kv in ("bf16", "kivi-2")
]
TABLES = {
    **dict(zip(("arrivals", "latencies", "steps"), arrivals_tables(ARRIVED), strict=True)),
    "one preset": sweep_table(MIXED[:2]),
    "two presets": sweep_table(MIXED),
    "task": workload_table(ASKED),
    "eval": accuracy_table(GRADED),
}
ESSENTIAL = {
    "one preset": {"kv", "batch", "out tok/s"},
    "two presets": {"kv", "batch", "out tok/s"},
    "task": {"kv", "requests", "right", "at once", "out tok/s"},
    "eval": {"task", "kv", "right", "accuracy"},
    "arrivals": {"kv", "rate", "out tok/s", "running"},
    "latencies": {"kv", "rate", "TTFT ms p50/p99"},
    "steps": {"kv", "rate", "decode steps: ms p50/p99"},
}


def one_row(notes: list[str], *columns: tuple[str, str, int]) -> Table:
    """A table of one row, of headers, cells and ranks among the spare columns."""
    cells = {header: cell for header, cell, _ in columns}
    return from_rows("", [cells], [Column(name, itemgetter(name), spare) for name, _, spare in columns], notes)


def grid_of(text: str) -> tuple[list[str], list[str]]:
    """The lines above the rule, and those below it."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"─"})
    return lines[:rule], lines[rule + 1 :]


def dropped(text: str) -> list[str]:
    found = re.search(r"a wider terminal or --format md shows (\d+) more columns?: (.*)", " ".join(text.split()))
    if found is None:
        return []
    names = found[2].split(", ")
    assert len(names) == int(found[1])
    return names


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_every_number_shown_is_whole(name: str, width: int) -> None:
    table, text = TABLES[name], as_text(TABLES[name], width)
    gone = dropped(text)
    assert "…" not in text and "..." not in text
    assert gone == [header for header in table.headers if header in gone]
    assert set(gone) <= set(table.spare) and not set(gone) & ESSENTIAL[name]
    _, body = grid_of(text)
    shown = [i for i, header in enumerate(table.headers) if header not in gone]
    for row in table.cells:
        numbers = [row[i] for i in shown if row[i] and table.headers[i] not in table.text]
        pattern = r"\s(?:.*\s)?".join(map(re.escape, numbers))
        assert any(re.search(rf"(?:^|\s){pattern}(?:\s|$)", line) for line in body), numbers


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_lines_keep_to_the_terminal(name: str, width: int) -> None:
    assert all(cell_len(line) <= width for line in as_text(TABLES[name], width).splitlines())


@pytest.mark.parametrize("name", TABLES)
def test_less_room_shows_fewer_columns_and_a_wide_terminal_all(name: str) -> None:
    gone = [dropped(as_text(TABLES[name], width)) for width in (200, 120, 80, 60, 40)]
    assert gone[0] == [] and gone[-1] != []
    for wide, narrow in pairwise(gone):
        assert set(wide) <= set(narrow)


def test_least_important_columns_go_first() -> None:
    table = one_row([], ("kv", "a", 0), ("x", "111", 2), ("y", "222", 0), ("z", "333", 1))
    assert dropped(as_text(table, 17)) == []
    assert dropped(as_text(table, 16)) == dropped(as_text(table, 12)) == ["z"]
    assert dropped(as_text(table, 11)) == ["x", "z"]


def test_what_cannot_be_left_out_keeps_its_width() -> None:
    table = one_row(["a note"], ("kv", "bf16", 0), ("tok/s", "123,456,789.0", 0), ("KV", "1,023.0 MiB", 1))
    text = as_text(table, 15)
    assert "bf16  123,456,789.0" in text and "1,023.0 MiB" not in text and "a note" in text


def test_headers_break_between_words_before_columns_go() -> None:
    table = one_row([], ("kv", "a", 0), ("decode tok/s", "1.0", 1), ("out tok/s", "2.0", 0))
    lines = as_text(table, 19).splitlines()
    assert [line.split() for line in lines[:2]] == [["decode", "out"], ["kv", "tok/s", "tok/s"]]
    assert dropped("\n".join(lines)) == []


def test_text_folds_and_numbers_beside_it_stay() -> None:
    table = Table("", ["task", "n"], [["a-very-long-name-of-a-task", "12,345"], ["b", "6"]], [], text=("task",))
    _, body = grid_of(as_text(table, 24))
    assert body[0].split() == ["a-very-long-name", "12,345"] and "-of-a-task" in body[1]


def test_markup_in_a_header_or_a_cell_is_text() -> None:
    assert as_text(Table("", ["vs [b]", "n"], [["[i]", "1"]], [])).splitlines()[::2] == ["vs [b]  n", "[i]     1"]


def test_a_number_stays_with_its_unit() -> None:
    assert wrapped("KV memory 256.0 MiB and more", 17) == ["KV memory", "256.0 MiB and", "more"]


def test_sections_are_set_apart_where_asked() -> None:
    rows = [["a", "1"], ["a", "2"], ["b", "3"]]
    assert "" in grid_of(as_text(Table("", ["k", "n"], rows, [])))[1]
    assert "" not in grid_of(as_text(Table("", ["k", "n"], rows, [], group=None)))[1]
    assert "" not in grid_of(as_text(Table("", ["k", "n"], rows[1:], [])))[1]


def test_a_title_breaks_between_its_parts() -> None:
    table = Table("demo · AMD EPYC · 200 in, 8 out", ["k"], [["a"]], [])
    assert as_text(table, 20).splitlines()[:2] == ["demo · AMD EPYC ·", "200 in, 8 out"]


def test_empty_columns_are_left_out() -> None:
    columns = [Column("a", lambda row: row), Column("b", lambda row: "")]
    assert from_rows("", ["1", ""], columns, []).headers == ["a"]


def test_markdown_is_aligned() -> None:
    lines = as_markdown(TABLES["two presets"]).splitlines()
    lines = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    rules = [rule.strip() for rule in lines[1].strip("|").split("|")]
    assert rules[0].endswith("--") and all(rule.endswith("-:") for rule in rules[1:-1]) and rules[-1].endswith("--")
    assert as_markdown(Table("", ["a|b"], [["c|d"]], [])).count("\\|") == 2


def test_a_listing_folds_its_values_and_keeps_its_names() -> None:
    lines = as_listing(
        "kv", [("sink tokens", "32"), ("policy", "blocks step down when memory runs short")], 40
    ).splitlines()
    assert lines[:2] == ["kv", "  sink tokens  32"]
    assert all(len(line) <= 40 for line in lines) and lines[3].startswith(" " * 15)
