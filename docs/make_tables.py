"""Fills the tables of measured rows in the pages from the files in ``results/``: ``python docs/make_tables.py``.

A section from ``<!-- results FILE -->`` to ``<!-- end -->`` has the tables that the command printed when it wrote
``results/FILE``; ``<!-- results FILE: kv, batch, output_tok_s -->`` has these columns instead. Below it stand the
command, the date, the commit and the versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from qkv_engine.bench.accuracy import AccuracyRow, accuracy_table
from qkv_engine.bench.arrivals_report import arrivals_tables
from qkv_engine.bench.arrivals_row import ArrivalsRow
from qkv_engine.bench.divergence import DivergenceRow, divergence_table
from qkv_engine.bench.harness import HarnessRow, harness_table
from qkv_engine.bench.judged import JudgedRow, judged_tables
from qkv_engine.bench.pareto import ParetoRow, pareto_table
from qkv_engine.bench.perplexity import PerplexityRow, perplexity_table
from qkv_engine.bench.provenance import Provenance
from qkv_engine.bench.quality import RatedRow, sweep_tables
from qkv_engine.bench.report import number
from qkv_engine.bench.result_files import Record, read_records
from qkv_engine.bench.table import Column, Table, as_markdown, from_rows, joined
from qkv_engine.sizes import format_size

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SECTION = re.compile(
    r"(<!-- results (\S+\.jsonl)(?:: ([^>]*?))? -->\n)(?:(?!<!-- results).)*?(<!-- end -->)", re.DOTALL
)
TARGETS = re.compile(r" --(?:output|plot|timeline)[ =]\S+")  # where a run wrote to, no part of its settings

TEXT = ("task", "kv", "status")  # columns that are no numbers

# Kinds of rows with the tables that commands print of them, those with fewer columns first.
KINDS: list[tuple[type[Provenance], Callable[[Sequence[Any]], Sequence[Table]]]] = [
    (RatedRow, sweep_tables),
    (ParetoRow, lambda rows: [pareto_table(rows)]),
    (ArrivalsRow, arrivals_tables),
    (AccuracyRow, lambda rows: [accuracy_table(rows)]),
    (DivergenceRow, lambda rows: [divergence_table(rows)]),
    (JudgedRow, judged_tables),
    (PerplexityRow, lambda rows: [perplexity_table(rows)]),
    (HarnessRow, lambda rows: [harness_table(rows)]),
]


def fill(page: str, results: Path = ROOT / "results") -> str:
    """``page`` with all sections made anew."""

    def section(found: re.Match[str]) -> str:
        records = read_records(results / found[2], field="results")
        columns = found[3] and [name.strip() for name in found[3].split(",")]
        tables = [chosen_columns(records, columns)] if columns else printed(records)
        text = "\n".join(map(as_markdown, tables))
        return f"{found[1]}\n{text}\n{caption(found[2], records)}\n\n{found[4]}"

    return SECTION.sub(section, page)


def printed(records: Sequence[Record]) -> Sequence[Table]:
    """The tables that the command printed of these rows. Raises ``ValueError`` for rows of no known kind."""
    for kind, table in KINDS:
        if set(records[0]) <= {field.name for field in fields(kind)}:
            return table([kind(**record) for record in records])
    raise ValueError(f"name the columns of a table of {', '.join(records[0])}")


def chosen_columns(records: Sequence[Record], columns: Sequence[str]) -> Table:
    """The named columns of the rows. Raises ``ValueError`` for one that no row has."""
    missing = [name for name in columns if not any(name in record for record in records)]
    if missing:
        raise ValueError(f"no column {', '.join(missing)} among {', '.join(records[0])}")
    known = {field.name for field in fields(Provenance)}
    origin = Provenance(**{name: value for name, value in records[0].items() if name in known})
    title = joined(records[0].get("model"), origin.machine, origin.dtype)
    shown = [Column[Record](name, partial(cell, name), is_text=name in TEXT) for name in columns]
    return from_rows(title, records, shown, [])


def cell(name: str, record: Record) -> str:
    """The column ``name`` of a row in words."""
    value = record.get(name)
    if isinstance(value, int | float) and "bytes" in name:
        return format_size(value)
    if isinstance(value, float):
        return f"{value:.1%}" if name.startswith("accuracy") else number(value, 1 if name.endswith("tok_s") else 2)
    return number(value, 0) if isinstance(value, int) else value or ""


def caption(file: str, records: Sequence[Record]) -> str:
    """The origin of rows in words: command, file, dates, commits and versions."""
    commands = [f"`{TARGETS.sub('', command)}`" for command in values(records, "command")]
    names = ("commit", "torch_version", "triton_version", "driver")
    origins = [f"{name.removesuffix('_version')} {' and '.join(values(records, name))}" for name in names]
    found = [origin for origin, name in zip(origins, names, strict=True) if values(records, name)]
    dates = dict.fromkeys(date[:10] for date in values(records, "date"))
    return " · ".join([*commands, f"`results/{file}`", *dates, *found])


def values(records: Sequence[Record], name: str) -> list[str]:
    """The different values of a column, without None."""
    return list(dict.fromkeys(str(record[name]) for record in records if record.get(name) is not None))


if __name__ == "__main__":
    for path in PAGES:
        page = path.read_text()
        if (filled := fill(page)) != page:
            path.write_text(filled)
            print(f"filled {path.relative_to(ROOT)}")
