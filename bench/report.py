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

from .status import FAILED, NO_FIT, QUEUED, status_cells, status_notes
from .sweep import SAMPLED, Row
from .table import PLAIN_WIDTH, Table, as_markdown, as_text, from_columns, joined

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .papers import Experiment


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


def sweep_table(rows: Sequence[Row], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The table of a sweep of ``ladders``; columns with nothing in them are left out, zeros of counters are nothing."""
    ratio, best_ratio = f"vs {rows[0].kv}", f"vs best {rows[0].kv}"
    base = {row.batch: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    best = max((rate or 0.0 for rate in base.values()), default=0.0)
    columns: dict[str, list[str]] = {
        "kv": [row.kv for row in rows],
        "batch": [number(row.batch, 0) for row in rows],
        "out tok/s": [number(row.output_tok_s, 1) for row in rows],
        "±": [_spread(row) for row in rows],
        "total tok/s": [number(row.total_tok_s, 1) for row in rows],
        ratio: [times(row.output_tok_s, base.get(row.batch)) for row in rows] if len(base) < len(rows) else [],
        best_ratio: [times(row.output_tok_s, best) for row in rows] if 1 < len(base) < len(rows) else [],
        "decode tok/s": [number(row.decode_tok_s, 1) for row in rows],
        "TTFT ms": [number(row.ttft_ms, 1) for row in rows],
        "TPOT ms": [number(row.tpot_ms, 2) for row in rows],
        "ITL ms": [number(row.itl_ms, 2) for row in rows],
        "p99": [number(row.itl_p99_ms, 2) for row in rows],
        "of limit": [number(row.of_limit, 2) for row in rows],
        "KV peak": [size(row.kv_bytes_peak) for row in rows],
        "codes": [size(row.kv_bytes_codes) for row in rows],
        "meta": [size(row.kv_bytes_meta) for row in rows],
        "dense": [size(row.kv_bytes_dense) if row.kv_bytes_codes else "" for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "demotions": [number(row.demotions or None, 0) for row in rows],
        "preemptions": [number(row.preemptions or None, 0) for row in rows],
        "status": status_cells(rows),
    }
    spare = ["±", "p99", "ITL ms", "total tok/s", "meta", "dense", "codes", "TPOT ms", "decode tok/s", "of limit"]
    spare += ["demotions", "preemptions", "TTFT ms", best_ratio, "status", ratio, "bits", "KV peak"]
    notes = [*_notes(rows), *unfilled_notes(rows, [row.kv for row in rows], ladders)]
    return from_columns(_title(rows), columns, notes, spare)


def paper_tables(ours: Table, experiment: Experiment) -> tuple[Table, Table]:
    """``ours`` under the experiment's name, and the published rows."""
    paper, rows = experiment.paper, experiment.paper.published
    remedy = f"scaled down to the demo model; the paper's size: --shape {paper.shape}"
    ours = ours._replace(
        title=f"{experiment.title} · {ours.title}", notes=[*ours.notes, *([remedy] if experiment.is_scaled else [])]
    )
    columns = {
        "published": [row.system for row in rows],
        "batch": [number(row.batch, 0) for row in rows],
        "out tok/s": [number(row.output_tok_s, 0) for row in rows],
        "total tok/s": [number(row.total_tok_s, 0) for row in rows],
        "vs baseline": [row.ratio for row in rows],
        "memory": [row.memory for row in rows],
        "note": [row.note for row in rows],
        "source": [row.source for row in rows],
    }
    about = f"Published, {paper.source} · {paper.hardware} · baseline: {paper.baseline}"
    theirs = from_columns(about, columns, list(paper.notes), ("source",))
    return ours, theirs._replace(text=("published", "memory", "note", "source"))


def workload_table(rows: Sequence[Row], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The table of a sweep of ``ladders`` over questions: the fate of the requests, their time and memory."""
    same, ratio = f"same as {rows[0].kv}", f"vs {rows[0].kv}"
    base = {row.batch: row.output_tok_s for row in rows if row.kv == rows[0].kv}
    columns: dict[str, list[str]] = {
        "kv": [row.kv for row in rows],
        "requests": [number(row.batch, 0) for row in rows],
        "finished": [number(row.finished, 0) for row in rows],
        "right": [number(row.right, 0) for row in rows],
        same: [number(row.same, 0) for row in rows] if len(base) < len(rows) else [],
        "at once": [number(row.max_running, 0) for row in rows],
        "preemptions": [number(row.preemptions, 0) for row in rows],
        "demotions": [number(row.demotions, 0) for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "KV peak": [size(row.kv_bytes_peak) for row in rows],
        "TTFT ms": [number(row.ttft_ms, 0) for row in rows],
        "seconds": [number(row.seconds, 1) for row in rows],
        "±": [_spread(row) for row in rows],
        "out tok/s": [number(row.output_tok_s, 1) for row in rows],
        ratio: [times(row.output_tok_s, base.get(row.batch)) for row in rows] if len(base) < len(rows) else [],
        "status": [row.status if row.status in (NO_FIT, FAILED) else "" for row in rows],
    }
    notes = [
        *_notes([row for row in rows if row.status != QUEUED]),
        *unfilled_notes(rows, [row.kv for row in rows], ladders),
    ]
    spare = [
        "±",
        "finished",
        "KV peak",
        "demotions",
        "TTFT ms",
        same,
        ratio,
        "seconds",
        "preemptions",
        "status",
        "bits",
    ]
    return from_columns(_title(rows), columns, notes, spare)


def _title(rows: Sequence[Row]) -> str:
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


def _notes(rows: Sequence[Row]) -> list[str]:
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


def _spread(row: Row) -> str:
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
