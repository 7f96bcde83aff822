"""Requests of several priorities: every invariant, as elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .options import Options
from .patch import Patch
from .test_simulator import check_bug_is_found, check_loads

BUGS = (
    Patch(
        "priorities are ignored",
        "queue",
        "_place",
        "return (request.params.priority, request.arrival)",
        "return (0, request.arrival)",
    ),
    Patch(
        "the most urgent gives way",
        "scheduler",
        "Scheduler._make_room",
        "victim = self.running.last",
        "victim = self.running.first",
    ),
)


def with_priorities(options: Options) -> Options:
    return replace(options, priorities=3)


def test_priorities_keep_every_invariant(report: list[str]):
    check_loads(report, range(7100, 7120), 400, with_priorities)


@pytest.mark.slow
def test_priorities_for_long(report: list[str]):
    check_loads(report, range(7200, 7500), 500, with_priorities)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found(bug: Patch):
    check_bug_is_found(bug, range(7100, 7110), 400, with_priorities)
