"""How far a load is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FROM_BYTES = 2**30  # of weights, from which on a load shows a bar


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for long loads on a terminal; yields the function that advances it by bytes."""
    if total < _FROM_BYTES or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
