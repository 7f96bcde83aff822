"""Progress on stderr that measurements share: a bar on a terminal, elsewhere a line for each thing begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from qkv_engine.errors import QKVError

from .log import note

if TYPE_CHECKING:
    from rich.progress import Progress

    from qkv_engine.bench.watch import Watched, Work

STOPPING = "stopping after the step under way"
POLL_SECONDS = 0.5  # between two looks at an engine, which answers between two of its steps
SPEED_SECONDS = 600.0  # of the past from which the time left is told; sizes differ, so much of it


class ProgressBar:
    """Rows done of ``total``, and the work under way. ``progress`` is None where no bar can be drawn."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total = progress, total
        self._task = None if progress is None else progress.add_task("loading", total=total)
        self._rows = 0
        self._done = 0.0  # rows, and parts of the next one
        self._name = ""

    def reach(self, rows: int) -> None:
        """Sets the number of rows done."""
        self._rows = rows
        self._done = rows
        self._update(rows)

    def advance(self) -> None:
        """Counts one more row done."""
        self.reach(self._rows + 1)

    def begin(self, name: str) -> None:
        """Names the work of all rows."""
        self._say(name, name)

    @contextmanager
    def watch(self, work: Work, engine: Watched) -> Iterator[None]:
        """Follows ``work`` while it goes on."""
        if work.name != self._name:
            self._name = work.name
            self._say(work.name, f"{self._rows + 1} of {self._total}: {work.name}")
        ended = Event()

        def poll() -> None:
            with suppress(QKVError):  # the work itself reports what broke
                while not ended.wait(POLL_SECONDS):
                    self._update(self._done + work.share * work.done(engine.stats()))

        thread = Thread(target=poll, daemon=True)
        if self._progress is not None:
            thread.start()
        try:
            yield
            self._done += work.share
        except KeyboardInterrupt:
            self._say(STOPPING, STOPPING)
            raise
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()
            self._update(self._done)

    def _say(self, on_bar: str, line: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=on_bar)
        else:
            note(line)

    def _update(self, done: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=min(done, self._total))


@contextmanager
def progress_bar(total: int) -> Iterator[ProgressBar]:
    """A bar of ``total`` rows, gone when the work ends; lines where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield ProgressBar(None, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, *left, console=console, transient=True, speed_estimate_period=SPEED_SECONDS) as progress:
        yield ProgressBar(progress, total)
