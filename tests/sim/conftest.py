"""Prints what the simulations did at the end of a run: figures to compare, and to reproduce by the seeds."""

from __future__ import annotations

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[str]:
    """Lines added here stand in the terminal summary."""
    return request.config.stash.setdefault(LINES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("simulated")
        for line in lines:
            terminalreporter.write_line(line)
