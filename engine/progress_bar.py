"""A bar of the requests that are done."""

from __future__ import annotations

from collections.abc import Iterator

from .serving.submission import Submission


def with_bar(submissions: list[Submission], show: bool) -> Iterator[Submission]:
    """The submissions one by one, under a bar that counts them if it is to be shown."""
    if not show:
        return iter(submissions)
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # draws in notebooks, too

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # without tqdm's thread, which would outlive the call

    return iter(Bar(submissions, desc="Requests"))
