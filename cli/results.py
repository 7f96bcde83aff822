"""Where measured rows go: stdout in the form asked for, and a file; the exit code they stand for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qkv_engine.errors import ConfigError

from . import common

if TYPE_CHECKING:
    from qkv_engine.bench.report import Table

FORMATS = ("table", "md", "csv", "json", "jsonl")


class Row(Protocol):
    """A dataclass with a status."""

    __dataclass_fields__: Any

    @property
    def status(self) -> str: ...


def add_arguments(add: Callable[..., Any]) -> None:
    """The options that say where rows go; ``add`` is an argument group's ``add_argument``."""
    add("-o", dest="format", choices=FORMATS, default="table", help="form of the rows (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the rows to FILE too, in the form its suffix names")


def check_targets(args: argparse.Namespace, *fields: str) -> None:
    """Refuse before the run what could not be written after it: ``--output``, and the paths of other ``fields``."""
    for field in ("output", *fields):
        path: Path | None = getattr(args, field)
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError("no such folder", field=field, value=str(path))


def deliver(args: argparse.Namespace, rows: Sequence[Row], table: Table, *more: Callable[[], None]) -> None:
    """Rows to stdout, to the file, and ``more``; each is tried, whatever befalls the others."""
    from qkv_engine.bench.report import PLAIN_WIDTH, SUFFIXES, render, write_file

    def show() -> None:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        sys.stdout.write(render(args.format, rows, table, width=width))
        sys.stdout.flush()

    with ExitStack() as stack:
        for action in more:
            stack.callback(action)
        if args.output is not None:
            kind = SUFFIXES.get(args.output.suffix.lower(), args.format)
            stack.callback(write_file, args.output, render(kind, rows, table).encode())
        stack.callback(show)


def exit_code(rows: Sequence[Row]) -> int:
    """Failure if any row failed, capacity if none fitted."""
    from qkv_engine.bench.sweep import FAILED, NO_FIT

    statuses = {row.status for row in rows}
    if FAILED in statuses:
        return common.EXIT_FAILURE
    return common.EXIT_CAPACITY if statuses == {NO_FIT} else common.EXIT_OK
