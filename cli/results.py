"""Delivery of results to stdout and to files, and their exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from qkv_engine.bench.forms import FORMATS, SUFFIXES, format_of
from qkv_engine.errors import ConfigError

from . import common
from .log import note
from .progress import ProgressBar, progress_bar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from qkv_engine.bench.table import Table

T = TypeVar("T")
Form = Callable[[str, int | None], str]  # the text of a format, in so many columns; None: the terminal's


class Extra(NamedTuple):
    """A file beside the results: its path, its contents when they are wanted, and its name in the report."""

    path: Path
    contents: Callable[[], bytes]
    what: str


def add_arguments(add: Callable[..., Any]) -> None:
    """The options that say where results go; ``add`` is an argument group's ``add_argument``."""
    add_format(add, "-o")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"write it to FILE too, in the form of its suffix ({', '.join(SUFFIXES)}), without one in FORMAT",
    )


def add_format(add: Callable[..., Any], *short: str) -> None:
    """The option ``--format``, and ``short`` for it."""
    add(
        *short,
        "--format",
        choices=FORMATS,
        default="table",
        metavar="FORMAT",
        help=f"form of what is printed: {', '.join(FORMATS)} (default: %(default)s)",
    )


def add_plot(add: Callable[..., Any], what: str, default: Path) -> None:
    """The option ``--plot``, which draws ``what``; without a file ``default``."""
    add(
        "--plot",
        nargs="?",
        const=default,
        type=Path,
        metavar="FILE",
        help=f"draw {what} as .png, .svg or .pdf (without FILE: {default}; needs the extra bench)",
    )


def check_targets_and_plot(args: argparse.Namespace, **suffixes: tuple[str, ...]) -> None:
    """``check_targets``, for ``--plot`` too. Raises ``ConfigError`` if what draws it is not installed."""
    from qkv_engine.bench.plots.picture import PLOT_SUFFIXES, require_matplotlib

    check_targets(args, **suffixes, plot=PLOT_SUFFIXES)
    if args.plot is not None:
        require_matplotlib()


def check_targets(args: argparse.Namespace, **suffixes: tuple[str, ...]) -> None:
    """Refuses files that could not be written after the run: ``--output``, and other files by option.

    ``suffixes`` are those that an option's file may have; rows, which ``--output`` writes by default, have many.
    """
    from qkv_engine.bench.files import check_writable

    seen: set[Path] = set()
    for field in dict.fromkeys(("output", *suffixes)):
        path: Path | None = getattr(args, field)
        if path is None:
            continue
        if field not in suffixes:
            format_of(path, args.format)
        elif path.suffix.lower() not in suffixes[field]:
            remedy = f"Use {', '.join(suffixes[field])}"
            raise ConfigError("its suffix names no known form", field=field, value=str(path), remedy=remedy)
        check_writable(path, field)
        if path.resolve() in seen:
            raise ConfigError("another option writes this file", field=field, value=str(path))
        seen.add(path.resolve())


def plot(args: argparse.Namespace, draw: Callable[[str], bytes]) -> list[Extra]:
    """The picture for ``--plot`` if it was asked for; ``draw`` makes it as "png", "svg" or "pdf"."""
    if args.plot is None:
        return []
    kind = args.plot.suffix.lower().removeprefix(".")
    return [Extra(args.plot, lambda: draw(kind), "a plot")]


def collect(total: int, measure: Callable[[ProgressBar], Iterable[T]], deliver: Callable[[list[T]], None]) -> list[T]:
    """What ``measure`` yields under a bar of ``total``; whatever ends the run, Ctrl-C included, it is delivered."""
    found = list[T]()
    try:
        with progress_bar(total) as bar:
            for one in measure(bar):
                found.append(one)
                bar.advance()
    finally:
        if found:
            deliver(found)
    return found


def deliver_rows(
    args: argparse.Namespace, rows: Sequence[DataclassInstance], tables: Sequence[Table], *extras: Extra
) -> None:
    """``deliver`` for measured rows, of which ``tables`` are for people."""
    from qkv_engine.bench.report import render

    what = f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
    deliver(args, lambda form, width: render(form, rows, *tables, width=width), what, *extras)


def deliver(args: argparse.Namespace, form: Form, what: str, *extras: Extra) -> None:
    """Results to stdout, to ``--output``, and the extras to their files; each is tried, whatever befalls the others.

    The last line on stderr says which files were written; ``what`` names the results there.
    """
    from qkv_engine.bench.table import PLAIN_WIDTH

    files = list(extras)
    if args.output is not None:
        kind = format_of(args.output, args.format)
        files.insert(0, Extra(args.output, lambda: form(kind, PLAIN_WIDTH).encode(), what))
    show_and_write(args.format, form, files)


def show_and_write(kind: str, form: Form, files: Sequence[Extra]) -> None:
    """Results to stdout as ``kind``, and ``files``, as ``deliver`` does."""
    from qkv_engine.bench.files import write_file
    from qkv_engine.bench.table import PLAIN_WIDTH

    written: list[str] = []

    def write(file: Extra) -> None:
        write_file(file.path, file.contents())
        written.append(f"{file.what} to {file.path}")

    def show() -> None:
        sys.stdout.write(form(kind, None if sys.stdout.isatty() else PLAIN_WIDTH))
        sys.stdout.flush()

    def report() -> None:
        if written:
            note(f"wrote {', '.join(written)}")

    with ExitStack() as stack:  # calls back in reverse
        stack.callback(report)
        for file in reversed(files):
            stack.callback(write, file)
        stack.callback(show)


def exit_code(statuses: Iterable[str]) -> int:
    """The exit code of rows of these statuses: failure if any failed, capacity if none fitted."""
    from qkv_engine.bench.status import FAILED, NO_FIT

    found = set(statuses)
    if FAILED in found:
        return common.EXIT_FAILURE
    return common.EXIT_CAPACITY if found == {NO_FIT} else common.EXIT_OK
