"""The bar of a measurement: what it shows while work goes on, and that it gets out of the way."""

import io
import threading

import pytest
from rich.console import Console
from rich.progress import Progress

from qkv_engine.cli import progress
from qkv_engine.cli.progress import Bar, progress_bar


def test_the_bar_follows_a_count_and_ends_at_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.001)
    seen = threading.Event()

    def count() -> int:
        seen.set()
        return 3

    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as shown:
        bar = Bar(shown, total=12)
        bar.advance(2)
        with bar.following("work", 4, count):
            assert seen.wait(10)
        task = shown.tasks[0]
        assert (task.description, task.completed, task.total) == ("work", 6, 12)


def test_the_bar_ends_where_work_fails() -> None:
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as shown:
        bar = Bar(shown, total=4)
        with pytest.raises(RuntimeError), bar.following("work", 4, lambda: 1):
            raise RuntimeError
        assert shown.tasks[0].completed == 4


def test_where_nobody_looks_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2) as bar, bar.following("work", 2, lambda: 1):
        bar.begin("other work")
    assert capsys.readouterr() == ("", "")
