"""Tables of runs with arrivals: of the load, the latencies and the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from qkv_engine.config import KVConfig
from qkv_engine.presets import PRESETS
from qkv_engine.sizes import format_size

from .arrivals_row import ArrivalsRow
from .report import number, short, size, times, unfilled_notes
from .status import status_cell, status_notes
from .table import Column, Table, from_rows, joined

KEYS: list[Column[ArrivalsRow]] = [
    Column("kv", lambda row: row.kv, is_text=True),
    Column("rate", lambda row: row.rate),
]


def arrivals_tables(rows: Sequence[ArrivalsRow], ladders: Mapping[str, KVConfig] = PRESETS) -> list[Table]:
    """The tables of runs of ``ladders``: of the load, and if anything ran of the latencies and the steps."""
    tables = [load_table(rows, ladders), latency_table(rows), steps_table(rows)]
    return [table for table in tables if table.cells]


def load_table(rows: Sequence[ArrivalsRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The table of what became of the requests and the memory; rates are compared with the first preset's."""
    base = {row.rate: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    if len(base) == len(rows):  # nothing to compare with
        base = {}
    columns: list[Column[ArrivalsRow]] = [
        *KEYS,
        Column("finished", lambda row: number(row.finished, 0), spare=7),
        Column("failed", lambda row: number(row.failed or None, 0), spare=1),
        Column("right", lambda row: number(row.right, 0)),
        Column("out tok/s", lambda row: number(row.output_tok_s, 1)),
        Column(f"vs {rows[0].kv}", lambda row: times(row.output_tok_s, base.get(row.rate)), spare=6),
        Column("req/s", lambda row: number(row.requests_s, 2), spare=3),
        Column("goodput", lambda row: number(row.goodput, 2), spare=12),
        Column("seconds", lambda row: number(row.seconds, 1), spare=2),
        Column("running", lambda row: number(row.max_running, 0)),
        Column("waiting", lambda row: number(row.max_waiting, 0), spare=13),
        Column("preemptions", lambda row: number(row.preemptions, 0), spare=11),
        Column("demotions", lambda row: number(row.demotions, 0), spare=10),
        Column("lowest", lambda row: short(row.lowest_bits), spare=8),
        Column("bits", lambda row: number(row.effective_bits, 2), spare=5),
        Column("KV peak", lambda row: size(row.kv_bytes_peak), spare=4),
        Column("status", status_cell, spare=9, is_text=True),
    ]
    notes = status_notes(rows, [f"{row.kv} {row.rate}" for row in rows])
    notes += unfilled_notes(rows, [row.kv for row in rows], ladders) + crowded_notes(rows, ladders)
    return from_rows(_title(rows), rows, columns, notes)


def crowded_notes(rows: Sequence[ArrivalsRow], ladders: Mapping[str, KVConfig]) -> list[str]:
    """Notes on ladders whose blocks stepped down although no more requests ran at once than with the first preset."""
    most = {row.rate: row.max_running for row in rows if row.kv == rows[0].kv}
    found = [
        row.kv
        for row in rows
        if row.demotions and row.kv in ladders and not ladders[row.kv].eager
        and (row.max_running or 0) <= (most.get(row.rate) or 0) and row.max_waiting
    ]  # fmt: skip
    names = ", ".join(dict.fromkeys(found))
    return [f"{names}: no more requests ran at once: contexts are too short for blocks to save memory"] if found else []


def latency_table(rows: Sequence[ArrivalsRow]) -> Table:
    """The table of latencies in ms: median and 99th percentile of each."""
    latencies = (("ttft", "TTFT", 0, 0), ("tpot", "TPOT", 1, 3), ("itl", "ITL", 1, 2), ("e2e", "E2E", 0, 1))
    columns = [
        Column(f"{label} ms p50/p99", partial(_percentiles, name, digits), spare)
        for name, label, digits, spare in latencies
    ]
    return _below(rows, columns)


def steps_table(rows: Sequence[ArrivalsRow]) -> Table:
    """The table of steps of each kind: their number, and their p50 and p99 in ms."""
    columns = [
        Column("decode steps: ms p50/p99", partial(_steps, "decode_steps")),
        Column("with demotions", partial(_steps, "decode_steps_demoting"), spare=2),
        Column("with a prompt", partial(_steps, "mixed_steps"), spare=3),
        Column("with a prompt and demotions", partial(_steps, "mixed_steps_demoting"), spare=1),
    ]
    return _below(rows, columns)


def _below(rows: Sequence[ArrivalsRow], columns: Sequence[Column[ArrivalsRow]]) -> Table:
    """A further table of rows that have been introduced; without any cells if nothing ran."""
    table = from_rows("", rows, [*KEYS, *columns], [])
    return table if len(table.headers) > len(KEYS) else Table("", [], [], [])


def _title(rows: Sequence[ArrivalsRow]) -> str:
    ran = next((row for row in rows if row.seconds), rows[0])
    lengths = f"{ran.input_len:,.0f} in, {ran.output_len:,.0f} out{' on average' if ran.task else ''}"
    parts = [ran.model, ran.machine, ran.dtype, f"{ran.requests:,} requests", ran.task, lengths]
    parts.append(f"KV memory {format_size(ran.kv_bytes_total)}" if ran.kv_bytes_total else None)
    parts.append(f"limits {ran.limits} ms" if ran.limits else None)
    return joined(*parts)


def _steps(name: str, row: ArrivalsRow) -> str:
    count = getattr(row, name)
    return f"{count:,}: {_percentiles(name, 1, row)}" if count else ""


def _percentiles(name: str, digits: int, row: ArrivalsRow) -> str:
    """Median and 99th percentile of the milliseconds ``name``, between a slash; nothing if there are none."""
    values = [getattr(row, f"{name}_ms_p{percent}") for percent in (50, 99)]
    return "" if None in values else " / ".join(number(value, digits) for value in values)
