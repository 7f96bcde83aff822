"""Where measured rows go: stdout in the form asked for, and a file; the exit code they stand for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine.errors import ConfigError

from . import common

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from qkv_engine.bench.report import Table

FORMATS = ("table", "md", "csv", "json", "jsonl")


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


def deliver(
    args: argparse.Namespace, rows: Sequence[DataclassInstance], table: Table, *more: Callable[[], None]
) -> None:
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


def exit_code(statuses: Iterable[str]) -> int:
    """What rows of these statuses stand for: failure if any failed, capacity if none fitted."""
    from qkv_engine.bench.sweep import FAILED, NO_FIT

    found = set(statuses)
    if FAILED in found:
        return common.EXIT_FAILURE
    return common.EXIT_CAPACITY if found == {NO_FIT} else common.EXIT_OK
