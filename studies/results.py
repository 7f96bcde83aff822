"""The rows of a study: collected until Ctrl-C or an error ends it, then printed and written to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qkv_engine.bench.files import write_file
from qkv_engine.bench.forms import FORMATS, format_of
from qkv_engine.bench.report import render
from qkv_engine.bench.table import PLAIN_WIDTH, Table
from qkv_engine.errors import ConfigError, QKVError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RowType = TypeVar("RowType")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``deliver`` reads."""
    add = parser.add_argument
    add("-o", dest="format", choices=FORMATS, default="table", help="form of the rows (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the rows to FILE too")


def collect(rows: Iterable[RowType]) -> tuple[list[RowType], int]:
    """The rows there are, and the exit code: 130 after Ctrl-C; 2 or 1 after an error of the engine, which it prints."""
    found: list[RowType] = []
    try:
        for row in rows:
            found.append(row)
    except KeyboardInterrupt:
        return found, 130
    except QKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return found, 2 if isinstance(error, ConfigError) else 1
    return found, 0


def deliver(args: argparse.Namespace, rows: Sequence[DataclassInstance], table: Table) -> None:
    """Prints ``rows``, in the form of ``table`` by default, and writes them to ``--output``."""
    if args.output is not None:
        kind = format_of(args.output, args.format)
        write_file(args.output, render(kind, rows, table).encode())
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    print(render(args.format, rows, table, width=width), end="")


def versions(packages: Iterable[str]) -> str:
    """The versions of those of ``packages`` that are installed."""
    found = []
    for name in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
