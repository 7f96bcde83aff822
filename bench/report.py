"""Results as text and as files: tables, markdown, CSV, JSON; a file is written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.config import format_size

from .sweep import FAILED, NO_FIT, OK, QUEUED, Row

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMATS = ("table", "md", "csv", "json", "jsonl")
SUFFIXES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".md": "md", ".txt": "table"}
PLAIN_WIDTH = 200  # columns of a table that goes to no terminal


class Table(NamedTuple):
    """A table for people: cells are text, ``group`` is the column whose change starts a new section."""

    title: str
    headers: list[str]
    cells: list[list[str]]
    notes: list[str]
    group: int = 0


def render(kind: str, records: Sequence[DataclassInstance], table: Table, *, width: int | None = PLAIN_WIDTH) -> str:
    """``records`` as "table" or "md" (both show ``table``), or as "csv", "json" or "jsonl" (every field).

    ``width`` in columns is for "table"; None is the terminal's, with its styles.
    """
    renderers: dict[str, Callable[[], str]] = {
        "table": lambda: _text(table, width),
        "md": lambda: _markdown(table),
        "csv": lambda: _csv(records),
        "json": lambda: _json([asdict(record) for record in records], indent=2) + "\n",
        "jsonl": lambda: "".join(_json(asdict(record)) + "\n" for record in records),
    }
    return renderers[kind]()


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)


def _csv(records: Sequence[DataclassInstance]) -> str:
    if not records:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(records[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    return text.getvalue()


def _markdown(table: Table) -> str:
    rules = ["---" if i == 0 else "---:" for i in range(len(table.headers))]
    body = [table.headers, rules, *([cell.replace("|", "\\|") for cell in row] for row in table.cells)]
    lines = [table.title, "", *(f"| {' | '.join(row)} |" for row in body)]
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)]) + "\n"


def _text(table: Table, width: int | None) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for i, header in enumerate(table.headers):
        grid.add_column(header, justify="left" if i in (0, len(table.headers)) else "right")
    for row, following in zip(table.cells, [*table.cells[1:], None], strict=True):
        is_last = following is not None and following[table.group] != row[table.group]
        grid.add_row(*map(Text, row), end_section=is_last)
    console = Console(width=width, file=io.StringIO() if width else None)
    with console.capture() as capture:
        console.print(Text(table.title, style="bold"), grid, *map(Text, table.notes), sep="\n")
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()) + "\n"


def sweep_table(rows: Sequence[Row]) -> Table:
    """The table of a sweep; columns with nothing in them are left out, and zeros of counters are nothing."""
    base = {row.batch: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    columns: dict[str, list[str]] = {
        "kv": [row.kv for row in rows],
        "batch": [str(row.batch) for row in rows],
        "out tok/s": [number(row.output_tok_s, 1) for row in rows],
        "±": [_spread(row) for row in rows],
        f"vs {rows[0].kv}": [_ratio(row, base) for row in rows] if len(base) < len(rows) else [],
        "decode tok/s": [number(row.decode_tok_s, 1) for row in rows],
        "TTFT ms": [number(row.ttft_ms, 1) for row in rows],
        "TPOT ms": [number(row.tpot_ms, 2) for row in rows],
        "ITL ms": [number(row.itl_ms, 2) for row in rows],
        "p99": [number(row.itl_p99_ms, 2) for row in rows],
        "KV peak": [_size(row.kv_bytes_peak) for row in rows],
        "codes": [_size(row.kv_bytes_codes) for row in rows],
        "meta": [_size(row.kv_bytes_meta) for row in rows],
        "dense": [_size(row.kv_bytes_dense) if row.kv_bytes_codes else "" for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "demotions": [str(row.demotions or "") for row in rows],
        "preemptions": [str(row.preemptions or "") for row in rows],
        "status": ["" if row.status == OK else row.status for row in rows],
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    cells = [list(row) for row in zip(*shown.values(), strict=True)]
    return Table(_title(rows), list(shown), cells, _notes(rows))


def workload_table(rows: Sequence[Row]) -> Table:
    """The table of a sweep over questions: what became of the requests, in how much time and memory."""
    base = {row.batch: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    columns: dict[str, list[str]] = {
        "kv": [row.kv for row in rows],
        "requests": [str(row.batch) for row in rows],
        "finished": [number(row.finished, 0) for row in rows],
        "right": [number(row.right, 0) for row in rows],
        f"same as {rows[0].kv}": [number(row.same, 0) for row in rows] if len(base) < len(rows) else [],
        "at once": [number(row.max_running, 0) for row in rows],
        "preemptions": [number(row.preemptions, 0) for row in rows],
        "demotions": [number(row.demotions, 0) for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "KV peak": [_size(row.kv_bytes_peak) for row in rows],
        "TTFT ms": [number(row.ttft_ms, 0) for row in rows],
        "seconds": [number(row.seconds, 1) for row in rows],
        "±": [_spread(row) for row in rows],
        "out tok/s": [number(row.output_tok_s, 1) for row in rows],
        f"vs {rows[0].kv}": [_ratio(row, base) for row in rows] if len(base) < len(rows) else [],
        "status": [row.status if row.status in (NO_FIT, FAILED) else "" for row in rows],
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    cells = [list(row) for row in zip(*shown.values(), strict=True)]
    return Table(_title(rows), list(shown), cells, _notes([row for row in rows if row.status != QUEUED]))


def _title(rows: Sequence[Row]) -> str:
    ran = next((row for row in rows if row.repeats), rows[0])
    parts = [ran.model, ran.device, ran.dtype, ran.task, f"{ran.input_len} in, {ran.output_len} out"]
    if ran.task and ran.kv_bytes_total:
        parts.append(f"KV memory {format_size(ran.kv_bytes_total)}")
    if ran.repeats > 1:
        parts.append(f"median of {ran.repeats} runs")
    return " · ".join(part for part in parts if part)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why rows are not "ok", each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status != OK:
            reasons.setdefault(f"{row.status}: {row.detail}", []).append(f"{row.kv} {row.batch}")
    return [f"{', '.join(sizes)} {reason}" for reason, sizes in reasons.items()]


def _ratio(row: Row, base: dict[int, float | None]) -> str:
    reference = base.get(row.batch)
    return f"{row.output_tok_s / reference:.2f}x" if row.output_tok_s and reference else ""


def _spread(row: Row) -> str:
    """Half the distance between the slowest and the fastest repeat, as a share of the median."""
    if row.repeats < 2 or not row.output_tok_s or row.output_tok_s_max is None or row.output_tok_s_min is None:
        return ""
    return f"{(row.output_tok_s_max - row.output_tok_s_min) / 2 / row.output_tok_s:.1%}"


def number(value: float | None, digits: int) -> str:
    """``value`` with thousands separated; nothing for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def _size(nbytes: int | None) -> str:
    return format_size(nbytes) if nbytes else ""


def write_file(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``: whole or not at all, safe against a crash. Raises ``OSError``."""
    target = path.resolve()  # a link stays, what it names is replaced
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a device or a pipe cannot be replaced
        return
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
