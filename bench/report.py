"""Measured rows as text: tables of a sweep, Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Protocol

from qkv_engine.config import BLOCK_TOKENS, KVConfig
from qkv_engine.presets import PRESETS
from qkv_engine.sizes import format_size

from .status import FAILED, NO_FIT, QUEUED, status_cell, status_notes
from .sweep import SAMPLED, SweepRow
from .table import PLAIN_WIDTH, Column, Table, as_markdown, as_text, from_rows, joined

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .papers import Experiment, Published


def render(kind: str, records: Sequence[DataclassInstance], *tables: Table, width: int | None = PLAIN_WIDTH) -> str:
    """``records`` as "table" or "md" (both show ``tables``), or as "csv", "json" or "jsonl" (every field).

    ``width`` in columns is for "table"; None is the terminal's, with its styles.
    """
    renderers: dict[str, Callable[[], str]] = {
        "table": lambda: "\n".join(as_text(table, width) for table in tables),
        "md": lambda: "\n".join(map(as_markdown, tables)),
        "csv": lambda: as_csv(records),
        "json": lambda: as_json([asdict(record) for record in records], indent=2) + "\n",
        "jsonl": lambda: "".join(as_json(asdict(record)) + "\n" for record in records),
    }
    return renderers[kind]()


def as_json(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON. Raises ``ValueError`` for a number that JSON cannot hold."""
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)


def as_csv(records: Sequence[DataclassInstance]) -> str:
    """``records`` of one class as CSV with a header; nothing for none."""
    if not records:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(records[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    return text.getvalue()


def sweep_table(rows: Sequence[SweepRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The table of a sweep of ``ladders``; columns with nothing in them are left out, zeros of counters are nothing."""
    base = {row.batch: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    best = max((rate or 0.0 for rate in base.values()), default=0.0) if len(base) > 1 else None
    if len(base) == len(rows):  # nothing to compare with
        base, best = {}, None
    columns: list[Column[SweepRow]] = [
        Column("kv", lambda row: row.kv, is_text=True),
        Column("batch", lambda row: number(row.batch, 0)),
        Column("out tok/s", lambda row: number(row.output_tok_s, 1)),
        Column("±", _spread, spare=1),
        Column("total tok/s", lambda row: number(row.total_tok_s, 1), spare=4),
        Column(f"vs {rows[0].kv}", lambda row: times(row.output_tok_s, base.get(row.batch)), spare=16),
        Column(f"vs best {rows[0].kv}", lambda row: times(row.output_tok_s, best), spare=14),
        Column("decode tok/s", lambda row: number(row.decode_tok_s, 1), spare=9),
        Column("TTFT ms", lambda row: number(row.ttft_ms, 1), spare=13),
        Column("TPOT ms", lambda row: number(row.tpot_ms, 2), spare=8),
        Column("ITL ms", lambda row: number(row.itl_ms, 2), spare=3),
        Column("p99", lambda row: number(row.itl_p99_ms, 2), spare=2),
        Column("of limit", lambda row: number(row.of_limit, 2), spare=10),
        Column("KV peak", lambda row: size(row.kv_bytes_peak), spare=18),
        Column("codes", lambda row: size(row.kv_bytes_codes), spare=7),
        Column("meta", lambda row: size(row.kv_bytes_meta), spare=5),
        Column("dense", lambda row: size(row.kv_bytes_dense) if row.kv_bytes_codes else "", spare=6),
        Column("states", lambda row: size(row.kv_bytes_state or None), spare=7),
        Column("bits", lambda row: number(row.effective_bits, 2), spare=17),
        Column("demotions", lambda row: number(row.demotions or None, 0), spare=11),
        Column("preemptions", lambda row: number(row.preemptions or None, 0), spare=12),
        Column("status", status_cell, spare=15, is_text=True),
    ]
    notes = [*_notes(rows), *unfilled_notes(rows, [row.kv for row in rows], ladders)]
    return from_rows(_title(rows), rows, columns, notes)


def paper_tables(ours: Table, experiment: Experiment) -> tuple[Table, Table]:
    """``ours`` under the experiment's name, and the published rows."""
    paper = experiment.paper
    remedy = f"scaled down to the demo model; the paper's size: --shape {paper.shape}"
    ours = ours._replace(
        title=f"{experiment.title} · {ours.title}", notes=[*ours.notes, *([remedy] if experiment.is_scaled else [])]
    )
    columns: list[Column[Published]] = [
        Column("published", lambda row: row.system, is_text=True),
        Column("batch", lambda row: number(row.batch, 0)),
        Column("out tok/s", lambda row: number(row.output_tok_s, 0)),
        Column("total tok/s", lambda row: number(row.total_tok_s, 0)),
        Column("vs baseline", lambda row: row.ratio),
        Column("memory", lambda row: row.memory, is_text=True),
        Column("note", lambda row: row.note, is_text=True),
        Column("source", lambda row: row.source, spare=1, is_text=True),
    ]
    about = f"Published, {paper.source} · {paper.hardware} · baseline: {paper.baseline}"
    return ours, from_rows(about, paper.published, columns, list(paper.notes))


def workload_table(rows: Sequence[SweepRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The table of a sweep of ``ladders`` over questions: the fate of the requests, their time and memory."""
    base = {row.batch: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    if len(base) == len(rows):  # nothing to compare with
        base = {}
    columns: list[Column[SweepRow]] = [
        Column("kv", lambda row: row.kv, is_text=True),
        Column("requests", lambda row: number(row.batch, 0)),
        Column("finished", lambda row: number(row.finished, 0), spare=2),
        Column("right", lambda row: number(row.right, 0)),
        Column(f"same as {rows[0].kv}", lambda row: number(row.same, 0) if base else "", spare=6),
        Column("at once", lambda row: number(row.max_running, 0)),
        Column("preemptions", lambda row: number(row.preemptions, 0), spare=9),
        Column("demotions", lambda row: number(row.demotions, 0), spare=4),
        Column("bits", lambda row: number(row.effective_bits, 2), spare=11),
        Column("KV peak", lambda row: size(row.kv_bytes_peak), spare=3),
        Column("TTFT ms", lambda row: number(row.ttft_ms, 0), spare=5),
        Column("seconds", lambda row: number(row.seconds, 1), spare=8),
        Column("±", _spread, spare=1),
        Column("out tok/s", lambda row: number(row.output_tok_s, 1)),
        Column(f"vs {rows[0].kv}", lambda row: times(row.output_tok_s, base.get(row.batch)), spare=7),
        Column("status", lambda row: row.status if row.status in (NO_FIT, FAILED) else "", spare=10, is_text=True),
    ]
    notes = _notes([row for row in rows if row.status != QUEUED])
    notes += unfilled_notes(rows, [row.kv for row in rows], ladders)
    return from_rows(_title(rows), rows, columns, notes)


def _title(rows: Sequence[SweepRow]) -> str:
    ran = next((row for row in rows if row.repeats), rows[0])
    lengths = f"{ran.input_len:,} in, {ran.output_len:,} out{' on average' if ran.task else ''}"
    parts = [ran.model, ran.machine, ran.dtype, ran.task, lengths]
    if ran.task and ran.kv_bytes_total:
        parts.append(f"KV memory {format_size(ran.kv_bytes_total)}")
    if ran.method == SAMPLED:
        parts.append("decode steps sampled, prompts not computed")
        if ran.weight_bytes and ran.kv_bytes_total:
            parts.append(f"weights and KV {format_size(ran.weight_bytes + ran.kv_bytes_total)}")
    elif ran.repeats > 1:
        parts.append(f"median of {ran.repeats} runs")
    return joined(*parts)


def _notes(rows: Sequence[SweepRow]) -> list[str]:
    return status_notes(rows, [f"{row.kv} {row.batch:,}" for row in rows])


class _Stored(Protocol):
    """A row that says how KV was stored."""

    @property
    def kv(self) -> str: ...

    @property
    def demotions(self) -> int | None: ...


def unfilled_notes(
    rows: Sequence[_Stored], names: Sequence[str], ladders: Mapping[str, KVConfig] = PRESETS
) -> list[str]:
    """Notes on ``ladders`` of several rungs that never lowered the precision of KV: their rows show 16 bits alone.

    Rows of one name count together.
    """
    demotions: dict[tuple[str, str], int] = {}
    for row, name in zip(rows, names, strict=True):
        if row.demotions is not None:
            demotions[name, row.kv] = demotions.get((name, row.kv), 0) + row.demotions
    reasons: dict[str, list[str]] = {}
    for name, kv in (key for key, number in demotions.items() if not number):
        ladder = ladders.get(kv)
        if ladder is not None and len(ladder.rungs) > 1:
            full = ladder.window.least_computed(ladder.sink + BLOCK_TOKENS)
            early = f"no block was filled, which takes {full} tokens of context: all KV stayed at 16 bits"
            ample = f"memory was never short, or contexts stayed under {full} tokens: all KV stayed at 16 bits"
            reasons.setdefault(early if ladder.eager else ample, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _spread(row: SweepRow) -> str:
    """Half the distance between the slowest and the fastest repeat, as a share of the median."""
    if row.repeats < 2 or not row.output_tok_s or row.output_tok_s_max is None or row.output_tok_s_min is None:
        return ""
    return f"{(row.output_tok_s_max - row.output_tok_s_min) / 2 / row.output_tok_s:.1%}"


def number(value: float | None, digits: int) -> str:
    """``value`` with thousands separated; nothing for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """``value`` without zeros at its end; nothing for None."""
    return "" if value is None else f"{value:g}"


def size(nbytes: int | None) -> str:
    """``nbytes`` with a unit; nothing for none."""
    return format_size(nbytes) if nbytes else ""


def times(value: float | None, base: float | None) -> str:
    """``value`` as a multiple of ``base``, such as "1.25x"; nothing where one of them is missing or 0."""
    return f"{value / base:.2f}x" if value and base else ""
