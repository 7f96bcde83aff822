"""The judge's tasks of the lm-evaluation-harness: every ladder, as many questions of each task, in a file of rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from qkv_engine import Engine
from qkv_engine.bench.files import write_file
from qkv_engine.bench.harness import HarnessPlan, HarnessRow, Tasks, run_harness
from qkv_engine.bench.report import as_json
from qkv_engine.bench.result_files import read_records
from qkv_engine.bench.status import OK

from .judge_ladders import Contender


def run_lm_eval(
    model: str,
    contenders: Mapping[str, Contender],
    open_engine: Callable[[Contender], Engine],
    path: Path,
    *,
    tasks: str,
    limit: int,
) -> None:
    """Adds the rows of ``tasks`` that the file at ``path`` lacks; nothing where the harness is not installed."""
    if find_spec("lm_eval") is None:
        print("lm-eval is not installed: its tasks are left out", file=sys.stderr)
        return
    records = read_records(path, field="output") if path.exists() else []
    rows = [HarnessRow(**record) for record in records if record["status"] == OK]
    missing = tuple(name for name in contenders if name not in {row.kv for row in rows})
    if not missing:
        return
    plan = HarnessPlan(model=model, kvs=missing, tasks=tuple(tasks.split(",")), limit=limit)
    for row in run_harness(plan, Tasks(plan), lambda kv: open_engine(contenders[kv])):
        rows.append(row)
        write_file(path, "".join(as_json(asdict(one)) + "\n" for one in rows).encode())
