"""Tables of runs with arrivals: of the load, the latencies and the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkv_engine.config import KVConfig
from qkv_engine.presets import PRESETS
from qkv_engine.sizes import format_size

from .arrivals_row import ArrivalsRow
from .report import number, short, size, times, unfilled_notes
from .status import status_cells, status_notes
from .table import Table, from_columns, joined


def arrivals_tables(rows: Sequence[ArrivalsRow], ladders: Mapping[str, KVConfig] = PRESETS) -> list[Table]:
    """The tables of runs of ``ladders``: of the load, and if anything ran of the latencies and the steps."""
    tables = [load_table(rows, ladders), latency_table(rows), steps_table(rows)]
    return [table for table in tables if table.cells]


def load_table(rows: Sequence[ArrivalsRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The table of what became of the requests and the memory; rates are compared with the first preset's."""
    ratio = f"vs {rows[0].kv}"
    base = {row.rate: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    columns: dict[str, list[str]] = {
        **_keys(rows),
        "finished": [number(row.finished, 0) for row in rows],
        "failed": [number(row.failed or None, 0) for row in rows],
        "right": [number(row.right, 0) for row in rows],
        "out tok/s": [number(row.output_tok_s, 1) for row in rows],
        ratio: [times(row.output_tok_s, base.get(row.rate)) for row in rows] if len(base) < len(rows) else [],
        "req/s": [number(row.requests_s, 2) for row in rows],
        "goodput": [number(row.goodput, 2) for row in rows],
        "seconds": [number(row.seconds, 1) for row in rows],
        "running": [number(row.max_running, 0) for row in rows],
        "waiting": [number(row.max_waiting, 0) for row in rows],
        "preemptions": [number(row.preemptions, 0) for row in rows],
        "demotions": [number(row.demotions, 0) for row in rows],
        "lowest": [short(row.lowest_bits) for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "KV peak": [size(row.kv_bytes_peak) for row in rows],
        "status": status_cells(rows),
    }
    spare = ["failed", "seconds", "req/s", "KV peak", "bits", ratio, "finished", "lowest", "status"]
    spare += ["demotions", "preemptions", "goodput", "waiting"]
    notes = status_notes(rows, [f"{row.kv} {row.rate}" for row in rows])
    notes += unfilled_notes(rows, [row.kv for row in rows], ladders) + crowded_notes(rows, ladders)
    return from_columns(_title(rows), columns, notes, spare)


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
    columns = {
        f"{label} ms p50/p99": [_percentiles(row, name, digits) for row in rows]
        for name, label, digits in (("ttft", "TTFT", 0), ("tpot", "TPOT", 1), ("itl", "ITL", 1), ("e2e", "E2E", 0))
    }
    return _below(rows, columns, spare=["E2E ms p50/p99", "ITL ms p50/p99", "TPOT ms p50/p99"])


def steps_table(rows: Sequence[ArrivalsRow]) -> Table:
    """The table of steps of each kind: their number, and their p50 and p99 in ms."""
    kinds = {
        "decode_steps": "decode steps: ms p50/p99",
        "decode_steps_demoting": "with demotions",
        "mixed_steps": "with a prompt",
        "mixed_steps_demoting": "with a prompt and demotions",
    }
    columns = {label: [_steps(row, name) for row in rows] for name, label in kinds.items()}
    return _below(rows, columns, spare=["with a prompt and demotions", "with demotions", "with a prompt"])


def _below(rows: Sequence[ArrivalsRow], columns: Mapping[str, list[str]], spare: Sequence[str]) -> Table:
    """A further table of rows that have been introduced; without any cells if nothing ran."""
    if not any(map(any, columns.values())):
        return Table("", [], [], [])
    return from_columns("", _keys(rows) | dict(columns), [], spare)


def _keys(rows: Sequence[ArrivalsRow]) -> dict[str, list[str]]:
    return {"kv": [row.kv for row in rows], "rate": [row.rate for row in rows]}


def _title(rows: Sequence[ArrivalsRow]) -> str:
    ran = next((row for row in rows if row.seconds), rows[0])
    lengths = f"{ran.input_len:,.0f} in, {ran.output_len:,.0f} out{' on average' if ran.task else ''}"
    parts = [ran.model, ran.machine, ran.dtype, f"{ran.requests:,} requests", ran.task, lengths]
    parts.append(f"KV memory {format_size(ran.kv_bytes_total)}" if ran.kv_bytes_total else None)
    parts.append(f"limits {ran.limits} ms" if ran.limits else None)
    return joined(*parts)


def _steps(row: ArrivalsRow, name: str) -> str:
    count = getattr(row, name)
    return f"{count:,}: {_percentiles(row, name, 1)}" if count else ""


def _percentiles(row: ArrivalsRow, name: str, digits: int) -> str:
    """Median and 99th percentile of the milliseconds ``name``, between a slash; nothing if there are none."""
    values = [getattr(row, f"{name}_ms_p{percent}") for percent in (50, 99)]
    return "" if None in values else " / ".join(number(value, digits) for value in values)
