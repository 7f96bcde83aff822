"""Progress of a measurement: what it shows while work goes on, and that it gets out of the way."""

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from qkv_engine.bench.watch import Work
from qkv_engine.cli import progress
from qkv_engine.cli.progress import ProgressBar, progress_bar
from qkv_engine.errors import EngineDeadError


class Running:
    """An engine that has read 160 tokens and written 10; ``asked`` counts the looks at it."""

    def __init__(self, error: Exception | None = None):
        self.asked = threading.Semaphore(0)
        self._error = error

    def stats(self) -> Any:
        self.asked.release()
        if self._error is not None:
            raise self._error
        return SimpleNamespace(num_finished=0, num_failed=0, prompt_tokens=160, generation_tokens=10)


def shown_bar(total: int) -> tuple[Progress, ProgressBar]:
    shown = Progress(console=Console(file=io.StringIO(), force_terminal=True))
    return shown, ProgressBar(shown, total)


def test_a_single_row_moves_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.001)
    shown, bar = shown_bar(total=1)
    engine, task = Running(), shown.tasks[0]
    with bar.watch(Work("bf16, batch 4", 4, 160, 30, share=0.25), engine):
        assert engine.asked.acquire(timeout=10) and engine.asked.acquire(timeout=10)
        assert (task.description, task.completed, task.total) == ("bf16, batch 4", 0.125, 1)
    assert task.completed == 0.25
    monkeypatch.setattr(progress, "POLL_SECONDS", 60.0)
    with bar.watch(Work("bf16, batch 4", 4, 160, 30, share=0.25), engine):
        assert task.completed == 0.25
    bar.reach(1)
    assert task.completed == 1


def test_the_bar_follows_rows_that_were_never_watched() -> None:
    shown, bar = shown_bar(total=4)
    bar.reach(3)
    assert shown.tasks[0].completed == 3
    with bar.watch(Work("next", 1, 1, 1), Running()):
        pass
    assert shown.tasks[0].completed == 4


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError, "work"), (KeyboardInterrupt, "stopping after the step under way")]
)
def test_work_that_breaks_off_is_not_counted_and_an_interrupt_is_answered(error: type, said: str) -> None:
    shown, bar = shown_bar(total=4)
    bar.reach(1)
    with pytest.raises(error), bar.watch(Work("work", 1, 1, 1), Running()):
        raise error
    assert (shown.tasks[0].completed, shown.tasks[0].description) == (1, said)


def test_an_interrupt_is_answered_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), progress_bar(1) as bar, bar.watch(Work("work", 1, 1, 1), Running()):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[1:] == ["qkv-engine: stopping after the step under way"]


def test_an_engine_that_died_ends_the_looking_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.001)
    _, bar = shown_bar(total=1)
    engine = Running(EngineDeadError("lost"))
    with bar.watch(Work("work", 1, 1, 1), engine):
        assert engine.asked.acquire(timeout=10)
        assert not engine.asked.acquire(timeout=0.05)


def test_where_nobody_looks_a_row_is_a_line_and_the_engine_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Running()
    with progress_bar(2) as bar:
        for done, name in enumerate(("bf16, batch 1", "bf16, batch 2")):
            for _ in range(4):  # runs of one row
                with bar.watch(Work(name, 1, 1, 1, share=0.25), engine):
                    pass
            bar.reach(done + 1)
    assert capsys.readouterr() == ("", "qkv-engine: 1 of 2: bf16, batch 1\nqkv-engine: 2 of 2: bf16, batch 2\n")
    assert not engine.asked.acquire(blocking=False)


def test_the_time_left_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, _environ={})
    monkeypatch.setattr("rich.console.Console", lambda **options: console)
    with progress_bar(4) as bar:
        bar.reach(1)
        with bar.watch(Work("bf16, batch 2", 1, 1, 1), Running()):
            pass
    assert "2/4" in screen.getvalue() and " left" in screen.getvalue() and "bf16, batch 2" in screen.getvalue()
