"""Traces of real traffic: when requests came and how long their prompts and outputs were.

Two published forms: Mooncake's JSON lines and the CSV of Azure's LLM inference traces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from qkv_engine.errors import ConfigError
from qkv_engine.input_files import read_input

MAX_FILE_NBYTES = 256 * 2**20  # of a trace, which is read whole
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
Length = Annotated[int, msgspec.Meta(ge=1)]


class Arrival(NamedTuple):
    """The lengths of a request in tokens, and when it comes, in seconds from the start; None where nobody said."""

    input_len: int
    output_len: int
    seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it may need: the last one sampled is never read."""
        return self.input_len + self.output_len - 1


class _MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace; ``timestamp`` is in ms. Other fields are passed over."""

    input_length: Length
    output_length: Length
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None


def read_trace(path: Path, *, limit: int, context: int | None) -> list[Arrival]:
    """The first ``limit`` requests of a trace, in the order of their times, the first of which is 0.

    A file that ends in .csv has Azure's columns (TIMESTAMP, which may be missing, ContextTokens, GeneratedTokens), any
    other JSON lines as Mooncake's: {"timestamp": ms, "input_length": n, "output_length": n}, where "timestamp" may be
    missing. Raises ``ConfigError`` with the number of the line for one that is no request or has more than ``context``
    tokens, for a trace of which only some lines have times, and for an empty file.
    """
    text = _decode(path, read_input(path, field="trace", max_nbytes=MAX_FILE_NBYTES))
    parse = _azure if path.suffix.lower() == ".csv" else _mooncake
    found: list[Arrival] = []
    for number, arrival in parse(path, text):
        if context is not None and arrival.num_tokens + 1 > context:
            tokens = f"{arrival.input_len:,} + {arrival.output_len:,} tokens"
            raise _wrong(path, number, f"{tokens} are more than the context of {context:,}", "Leave the request out")
        if found and (arrival.seconds is None) != (found[0].seconds is None):
            raise _wrong(path, number, "only some lines have a time", "Give every line one, or none")
        found.append(arrival)
        if len(found) == limit:
            break
    if not found:
        raise ConfigError("has no requests", field="trace", value=str(path), remedy="Give one request a line")
    return _from_zero(found)


def _from_zero(found: list[Arrival]) -> list[Arrival]:
    times = [arrival.seconds for arrival in found if arrival.seconds is not None]
    if not times:
        return found
    start = min(times)
    moved = [arrival._replace(seconds=(arrival.seconds or 0.0) - start) for arrival in found]
    return sorted(moved, key=lambda arrival: arrival.seconds or 0.0)


def _mooncake(path: Path, text: str) -> Iterator[tuple[int, Arrival]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_MooncakeLine)
        except (msgspec.MsgspecError, RecursionError) as error:
            remedy = 'Give one object a line: {"timestamp": 0, "input_length": 512, "output_length": 128}, time in ms'
            raise _wrong(path, number, f"is no request: {error}", remedy) from error
        seconds = None if found.timestamp is None else found.timestamp / 1e3
        yield number, Arrival(found.input_length, found.output_length, seconds)


def _azure(path: Path, text: str) -> Iterator[tuple[int, Arrival]]:
    rows = csv.DictReader(io.StringIO(text))
    time, *lengths = AZURE_COLUMNS
    try:
        missing = [column for column in lengths if column not in (rows.fieldnames or ())]
        if missing:
            raise _wrong(path, 1, f"has no column {missing[0]}", f"Begin with the line {','.join(AZURE_COLUMNS)}")
        for row in rows:
            number = rows.line_num
            input_len, output_len = (_cell(path, number, column, row[column], _length) for column in lengths)
            seconds = _cell(path, number, time, row[time], _seconds) if time in row else None
            yield number, Arrival(int(input_len), int(output_len), seconds)
    except csv.Error as error:
        raise _wrong(path, rows.line_num + 1, f"is no CSV: {error}", "Give one request a line") from error


def _cell(path: Path, number: int, column: str, text: str | None, convert: Callable[[str], float]) -> float:
    try:
        return convert(text or "")
    except (ValueError, OverflowError) as error:
        remedy = "Give lengths from 1, and times such as 2023-11-16 18:17:03.9799600"
        raise _wrong(path, number, f"{column} is {text!r}", remedy) from error


def _length(text: str) -> int:
    if not text.strip().isdecimal() or not 0 < int(text) < 2**31:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = 1 + data[: error.start].count(b"\n")
        raise _wrong(path, number, "is no text in UTF-8", "Save the trace as UTF-8") from error


def _wrong(path: Path, number: int, message: str, remedy: str) -> ConfigError:
    return ConfigError(f"line {number} {message}", field="trace", value=str(path), remedy=remedy)
