"""Requests with ``num_prefill_tokens`` among others: every invariant, as elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from .options import Options, draw
from .patch import Patch
from .simulator import Simulation
from .spy import Broken
from .test_ratios import with_ratio
from .test_simulator import check_loads

# A bug, and a seed that shows it.
BUGS = (
    (
        Patch(
            "a chunk goes on where a block may step down",
            "scheduler",
            "Scheduler._wanted",
            "end = min(end, request.num_prefill_tokens if is_prefill else self.space.next_aging(request))",
            "end = min(end, request.num_prefill_tokens if is_prefill else end)",
        ),
        3000,
    ),
    (
        Patch(
            "a chunk goes on behind the prefill",
            "scheduler",
            "Scheduler._wanted",
            "end = min(end, request.num_prefill_tokens if is_prefill else self.space.next_aging(request))",
            "end = min(end, end if is_prefill else self.space.next_aging(request))",
        ),
        3000,
    ),
    (
        Patch(
            "scored requests wait for their turn",
            "pressure",
            "Pressure._settle",
            "self._demote([(candidate, candidate.block.floor) for candidate in urgent + others[:budget]])",
            "self._demote([(candidate, candidate.block.floor) for candidate in found[:budget]])",
        ),
        3000,
    ),
)


def with_scored(options: Options) -> Options:
    """The same options with scored requests and two rungs or more, mostly eager, half with a window by ratio."""
    rng = random.Random(options.seed)
    changed = with_ratio(options)
    ratio = rng.choice((options.recent_ratio, changed.recent_ratio))
    return replace(changed, scored=0.5, eager=rng.random() < 0.7, recent_ratio=ratio)


def test_scored_requests_keep_every_invariant(report: list[str]):
    check_loads(report, range(3040, 3070), 400, with_scored)


@pytest.mark.slow
def test_scored_requests_for_long(report: list[str]):
    check_loads(report, range(4000, 4500), 500, with_scored)


@pytest.mark.parametrize(("bug", "seed"), BUGS, ids=lambda value: value.name if isinstance(value, Patch) else "")
def test_a_seeded_bug_is_found(bug: Patch, seed: int):
    simulation = Simulation(with_scored(draw(seed)), bug)
    with pytest.raises(Broken):
        simulation.run(400)
