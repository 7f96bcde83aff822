"""Two or more result files side by side: rows of equal settings, and the ratios of their metrics."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeGuard

from qkv_engine.errors import ConfigError

from .provenance import Provenance
from .result_files import Record, read_records
from .status import OK, QUEUED
from .table import Column, Table, from_rows

# Columns that rows are matched by, in the order of the table.
SETTINGS = (
    *("model", "preset", "kv", "method", "task", "size", "text", "metric", "filter", "rate", "limits", "batch"),
    *("requests", "input_len", "output_len", "context", "stride", "samples", "num_fewshot", "eval_tasks"),
)
NAMED = ("model", "preset", "kv", "method", "task", "text", "metric")  # settings shown by their values alone
MEANS = ("input_len", "output_len")  # settings of random prompts, but measured means of a task
HIGHER_IS_BETTER = re.compile(r"(\w+_)?tok_s|\w*req\w*_s|goodput\w*|accuracy|right|of_\w+|max_running|capacity\w*")
LOWER_IS_BETTER = re.compile(
    r"\w+_ms(_\w+)?|\w*seconds|duration\w*|perplexity|nll|bits_per_byte|kv_bytes_(?!total)\w+|floor_bytes\w*"
)
LOWER_SCORES = re.compile(r"perplexity|ppl|bits|loss", re.IGNORECASE)  # among the metrics of lm-evaluation-harness
INTERVALS = (("_min", "_max"), ("_low", "_high"))  # suffixes of the bounds of a metric
ORIGIN = [field.name for field in fields(Provenance) if field.name not in ("date", "command")]
NEAR = 0.1  # share by which the batch of two rows may differ where nothing else does
SAME, BETTER, WORSE = "same", "better", "worse"
MARKS = {SAME: "", BETTER: "▲ ", WORSE: "▼ "}

_first = itemgetter(0)
Settings = tuple[tuple[str, str], ...]
Key = tuple[Settings, int]  # with a number among rows of the same settings


@dataclass(frozen=True, kw_only=True)
class Change:
    """One metric of one row in the first file and in a later one.

    ``row`` has the settings in which rows differ. ``ratio`` is ``after`` / ``before``, None where that was 0.
    ``allowed`` is the relative change up to which ``verdict`` is "same"; beyond it is "better" or "worse".
    """

    file: str
    row: str
    metric: str
    before: float
    after: float
    ratio: float | None
    allowed: float
    verdict: str


class Comparison(NamedTuple):
    """Changes of matched rows, their table, and the rows of the first file that a later one lacks."""

    changes: list[Change]
    table: Table
    missing: list[str]

    @property
    def has_regressed(self) -> bool:
        """Whether a metric is worse or a row is missing."""
        return bool(self.missing) or any(change.verdict == WORSE for change in self.changes)


def compare(paths: Sequence[Path], threshold: float) -> Comparison:
    """The rows of each later file beside those of the first; a change up to the share ``threshold`` counts as none.

    Rows that did not run count as missing. Raises ``ConfigError`` for a file that holds no rows, or none in common
    with the first.
    """
    first, *others = ((str(path), _by_settings(read_records(path, field="compare"))) for path in paths)
    varying = _varying([settings for _, rows in (first, *others) for settings, _ in rows])
    changes, missing, notes = list[Change](), list[str](), list[str]()
    for name, rows in others:
        rows = _like(first[1], rows)
        both = [(_label(key, varying), row, rows[key]) for key, row in first[1].items() if key in rows]
        if not both:
            remedy = "Rows match by model, kv, task, batch, lengths and the like"
            raise ConfigError(f"has no row in common with {first[0]}", field="compare", value=name, remedy=remedy)
        for label, before, after in both:
            beside = "" if before.get("batch") == after.get("batch") else f" beside {after['batch']}"
            changes += _changes(name, label + beside, before, after, threshold)
        lacking = [_label(key, varying) for key in first[1] if key not in rows]
        added = [_label(key, varying) for key in rows if key not in first[1]]
        missing += lacking
        notes += _only_in(first[0], lacking) + _only_in(name, added)
        notes += _origins(name, [before for _, before, _ in both], [after for _, _, after in both])
    title = f"ratios of {paths[1]} to {first[0]}" if len(others) == 1 else f"ratios to {first[0]}"
    return Comparison(changes, _table(title, changes, threshold, notes), missing)


def _by_settings(records: Sequence[Record]) -> dict[Key, Record]:
    """The rows that ran, by their settings."""
    found: dict[Key, Record] = {}
    numbers = Counter[Settings]()
    for record in records:
        if record.get("status", OK) in (OK, QUEUED):
            settings = _settings(record)
            numbers[settings] += 1
            found[settings, numbers[settings]] = record
    return found


def _settings(record: Record) -> Settings:
    means = MEANS if record.get("task") else ()
    names = (name for name in SETTINGS if record.get(name) is not None and name not in means)
    return tuple((name, str(record[name])) for name in names)


def _like(first: dict[Key, Record], rows: dict[Key, Record]) -> dict[Key, Record]:
    """``rows``, renamed to the settings of ``first`` where only the batch differs, by a tenth at most.

    The largest batch that fits moves with the memory that is left.
    """
    spare: dict[Settings, list[tuple[float, Key]]] = {}  # by batch
    for key in rows:
        if key not in first and _is_number(rows[key].get("batch")):
            spare.setdefault(_but_batch(key), []).append((rows[key]["batch"], key))
    for group in spare.values():
        group.sort(key=_first)
    found = dict(rows)
    for key, row in first.items():
        group = spare.get(_but_batch(key), [])
        if key in rows or not group or not _is_number(row.get("batch")):
            continue
        batch = row["batch"]
        place = bisect_left(group, batch, key=_first)
        nearest = min(range(max(0, place - 1), min(len(group), place + 1)), key=lambda i: abs(group[i][0] - batch))
        if abs(group[nearest][0] - batch) <= NEAR * batch:
            found[key] = found.pop(group.pop(nearest)[1])
    return found


def _but_batch(key: Key) -> Settings:
    return tuple((name, value) for name, value in key[0] if name != "batch")


def _varying(rows: Sequence[Settings]) -> set[str]:
    """The settings in which rows differ, and the preset."""
    return {"kv"} | {name for name in SETTINGS if len({dict(row).get(name) for row in rows}) > 1}


def _label(key: Key, varying: set[str]) -> str:
    """The settings of a row in words, such as "int4, batch 4"."""
    settings, number = key
    words = [value if name in NAMED else f"{name} {value}" for name, value in settings if name in varying]
    return ", ".join([*words, *([f"number {number}"] if number > 1 else [])])


def _changes(file: str, row: str, before: Record, after: Record, threshold: float) -> Iterator[Change]:
    was, now = _metrics(before), _metrics(after)
    for metric in (metric for metric in was if metric in now):
        old, new = was[metric], now[metric]
        allowed = max(threshold, _spread(before, metric) + _spread(after, metric))
        verdict = SAME
        if abs(new - old) > allowed * abs(old):
            verdict = BETTER if (new > old) is _is_higher_better(metric, before) else WORSE
        yield Change(
            file=file,
            row=row,
            metric=metric,
            before=old,
            after=new,
            ratio=round(new / old, 4) if old else None,
            allowed=round(allowed, 4),
            verdict=verdict,
        )


def _metrics(record: Record) -> dict[str, float]:
    """The metrics of a row by name; a row of lm-evaluation-harness has one, named in a column of its own."""
    if record.get("metric") and _is_number(record.get("value")):
        return {str(record["metric"]): record["value"]}
    known = (HIGHER_IS_BETTER, LOWER_IS_BETTER)
    return {
        name: value
        for name, value in record.items()
        if _is_number(value) and any(pattern.fullmatch(name) for pattern in known)
    }


def _is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, and a finite one as a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_higher_better(metric: str, record: Record) -> bool:
    if record.get("metric") == metric:
        return LOWER_SCORES.search(metric) is None
    return HIGHER_IS_BETTER.fullmatch(metric) is not None


def _spread(record: Record, metric: str) -> float:
    """Half the interval of a metric, as a share of it; that of the row's throughput where it has none of its own."""
    if record.get("metric") == metric and _is_share(record, "value") and _is_number(record.get("stderr")):
        return float(1.96 * record["stderr"] / abs(record["value"]))  # the half of a 95 % interval
    for name in (metric, "output_tok_s"):
        bounds = [(f"{name}{low}", f"{name}{high}") for low, high in INTERVALS]
        bounds += [("low", "high")] if name == "accuracy" else []
        for low, high in bounds:
            if _is_share(record, name) and _is_number(record.get(low)) and _is_number(record.get(high)):
                return float((record[high] - record[low]) / 2 / abs(record[name]))
    return 0.0


def _is_share(record: Record, name: str) -> bool:
    """Whether ``record`` has a number as ``name`` that something can be a share of."""
    return bool(record.get(name)) and _is_number(record[name])


def _only_in(file: str, rows: Sequence[str]) -> list[str]:
    return [f"only in {file}: {'; '.join(rows)}"] if rows else []


def _origins(file: str, before: Sequence[Record], after: Sequence[Record]) -> Iterator[str]:
    """The versions and machines in which two files differ."""
    for name in ORIGIN:
        was, now = ([*dict.fromkeys(str(record.get(name)) for record in records)] for records in (before, after))
        if was != now:
            yield f"{file}: {name} {', '.join(was)} -> {', '.join(now)}"


def _table(title: str, changes: Sequence[Change], threshold: float, notes: list[str]) -> Table:
    """One line a row and one column a metric, rates first; metrics that changed nowhere are named below."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for change in changes:
        ratio = f"{change.ratio:.2f}x" if change.ratio is not None else "" if change.after == 0 else "new"
        cells.setdefault((change.file, change.row), {})[change.metric] = MARKS[change.verdict] + ratio
    changed = {change.metric: None for change in changes if change.before != change.after}
    shown = sorted(changed, key=lambda metric: LOWER_IS_BETTER.fullmatch(metric) is not None)
    has_files = len({file for file, _ in cells}) > 1
    columns: list[Column[tuple[str, str]]] = [
        Column("file", lambda key: key[0] if has_files else ""),
        Column("row", lambda key: key[1], is_text=True),
        *(Column(metric, partial(_cell, cells, metric), len(shown) - i if i else 0) for i, metric in enumerate(shown)),
    ]
    legend = f"▲ better, ▼ worse: by more than {100 * threshold:g} % and than the spread of the runs"
    equal = list(dict.fromkeys(change.metric for change in changes if change.metric not in changed))
    notes = [legend, *([f"equal: {', '.join(equal)}"] if equal else []), *notes]
    return from_rows(title, list(cells), columns, notes)


def _cell(cells: dict[tuple[str, str], dict[str, str]], metric: str, key: tuple[str, str]) -> str:
    return cells[key].get(metric, "")
