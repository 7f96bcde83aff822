"""Capacity against right answers, of rows that ``bench --pareto`` wrote: ``python -m studies.frontier ROWS IMAGE``.

For rows of a machine whose speeds say nothing of the presets, such as a CPU's: they are left out.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

from qkv_engine.bench.files import write_file
from qkv_engine.bench.pareto import ParetoRow
from qkv_engine.bench.plots.pareto import plot_pareto
from qkv_engine.bench.result_files import read_records


def read_rows(path: Path) -> list[ParetoRow]:
    """The rows of a result file, without their speeds. Raises ``ConfigError`` for a file of others."""
    names = {field.name for field in fields(ParetoRow)}
    records = read_records(path, field="rows")
    return [
        replace(ParetoRow(**{name: value for name, value in record.items() if name in names}), output_tok_s=None)
        for record in records
    ]


def main(rows: str, picture: str) -> None:
    path = Path(picture)
    write_file(path, plot_pareto(read_rows(Path(rows)), kind=path.suffix.removeprefix(".")))


if __name__ == "__main__":
    main(*sys.argv[1:])
