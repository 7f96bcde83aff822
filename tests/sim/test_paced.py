"""Chunks of few tokens beside requests that decode: every invariant, as elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from .options import Options
from .patch import Patch
from .test_scored import with_scored
from .test_simulator import check_bug_is_found, check_loads

BUGS = (
    Patch("chunks are not counted", "scheduler", "Scheduler.schedule", "chunk_budget -= num_tokens", "pass"),
    Patch(
        "new requests know no limit",
        "scheduler",
        "Scheduler.schedule",
        "started = self._admit(min(budget, chunk_budget)) if self.num_preemptions == preempted else []",
        "started = self._admit(budget) if self.num_preemptions == preempted else []",
    ),
)


def with_pace(options: Options) -> Options:
    """The same options with few chunk tokens, half of them with scored requests."""
    rng = random.Random(options.seed)
    changed = with_scored(options) if rng.random() < 0.5 else options
    return replace(changed, chunk_tokens=rng.randint(1, max(1, min(options.budget, 3 * options.block))))


def test_paced_requests_keep_every_invariant(report: list[str]):
    check_loads(report, range(6100, 6120), 400, with_pace)


@pytest.mark.slow
def test_paced_requests_for_long(report: list[str]):
    check_loads(report, range(7000, 7500), 500, with_pace)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found(bug: Patch):
    check_bug_is_found(bug, range(6100, 6140), 400, with_pace, "over the limit")
