"""A progress bar on stderr that measurements share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from qkv_engine.errors import QKVError

if TYPE_CHECKING:
    from rich.progress import Progress

POLL_SECONDS = 0.5


class Bar:
    """The bar of one command: what is being done, and how much of it is."""

    def __init__(self, progress: Progress, total: int):
        self._progress, self._task = progress, progress.add_task("loading", total=total)
        self._done = 0

    def begin(self, description: str) -> None:
        """Says what comes next."""
        self._progress.update(self._task, description=description)

    def advance(self, steps: int = 1) -> None:
        """So much more is done."""
        self._done += steps
        self._progress.update(self._task, completed=self._done)

    @contextmanager
    def following(self, description: str, steps: int, count: Callable[[], int]) -> Iterator[None]:
        """Work of ``steps``, of which ``count`` says how many are done while it goes on."""
        ended = Event()

        def poll() -> None:
            with suppress(QKVError):  # the work itself reports what broke
                while not ended.wait(POLL_SECONDS):
                    self._progress.update(self._task, completed=self._done + min(count(), steps))

        thread = Thread(target=poll, daemon=True)
        self.begin(description)
        if not self._progress.disable:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()
            self.advance(steps)


@contextmanager
def progress_bar(total: int) -> Iterator[Bar]:
    """The bar, gone when the work ends; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_silent = not console.is_terminal or console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=is_silent) as progress:
        yield Bar(progress, total)
