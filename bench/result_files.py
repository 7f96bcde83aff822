"""Files of measured rows, as ``--output`` writes them: JSON, JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkv_engine.errors import ConfigError
from qkv_engine.input_files import read_input

MAX_NBYTES = 2**26

Record = dict[str, Any]  # a row of any command, by column


def read_records(path: Path, *, field: str) -> list[Record]:
    """The rows of the file at ``path``; empty cells of CSV are None.

    Raises ``ConfigError``, naming the option ``field``, for a file that cannot be read or holds anything else.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            "its suffix names no form of rows", field=field, value=str(path), remedy=f"Use {', '.join(READERS)}"
        )
    data, remedy = read_input(path, field=field, max_nbytes=MAX_NBYTES), "Give a file that --output wrote"
    try:
        records = reader(data.decode("utf-8"))
    except (ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(f"cannot be read: {error}", field=field, value=str(path), remedy=remedy) from error
    if not records:
        raise ConfigError("holds no rows", field=field, value=str(path), remedy=remedy)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("kv"), str) or None in record:
            raise ConfigError(f"row {number} is none of a benchmark", field=field, value=str(path), remedy=remedy)
    return records


def _json(text: str) -> list[Any]:
    found = json.loads(text)
    return found if isinstance(found, list) else [found]


def _json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _csv(text: str) -> list[Any]:
    return [
        {name: _value(cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text), strict=True)
    ]


def _value(cell: Any) -> Any:
    """The value of a cell: a number where it is written as one, None where it is empty."""
    for kind in (int, float):
        try:
            return kind(cell)
        except (TypeError, ValueError):
            continue
    return cell or None


READERS: dict[str, Callable[[str], list[Any]]] = {".json": _json, ".jsonl": _json_lines, ".csv": _csv}
