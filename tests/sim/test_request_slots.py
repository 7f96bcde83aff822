"""Requests with slots that hold no tokens, beside a sink or alone: every invariant, as elsewhere."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from .options import Options, draw
from .patch import Patch
from .simulator import Simulation
from .spy import Broken
from .test_simulator import check_loads, describe, swarm

# A bug, and a seed that shows it.
BUGS = (
    (
        Patch(
            "a slot without tokens is filed as a prefix",
            "table",
            "BlockTables.entries",
            "return [*table.slots[:bool(self.group.sink)], *table.blocks]",
            "return [*table]",
        ),
        1,
    ),
    (
        Patch("only the first slot is taken", "table", "BlockTables.reserve", "len(self.group.slots)", "1"),
        0,
    ),
    (
        Patch(
            "a request that found its sink lacks no slot",
            "table",
            "BlockTables.reserve",
            "slots = self.group.slots[len(table.slots):]",
            "slots = () if table.slots else self.group.slots",
        ),
        271,
    ),
    (
        Patch(
            "admission counts one slot a request",
            "demand",
            "Demand.slots",
            "self._tables.group.slots",
            "self._tables.group.slots[:1]",
        ),
        1,
    ),
)


def with_slots(options: Options) -> Options:
    """The same options with one or two slots more, of any size up to a block's, and the slabs that they begin."""
    rng = random.Random(options.seed)
    slots = tuple(rng.choice((1, 3, *options.sizes)) for _ in range(rng.randint(1, 2)))
    return replace(options, other_slots=slots, slabs=options.slabs + len(slots))


def test_slots_without_tokens_keep_every_invariant(report: list[str]):
    check_loads(report, range(300, 330), 400, with_slots)


@pytest.mark.slow
def test_slots_without_tokens_for_long(report: list[str]):
    started, seeds = time.monotonic(), range(400, 900)
    report.append(describe(seeds, *swarm(seeds, 500, with_slots), time.monotonic() - started))


@pytest.mark.parametrize(("bug", "seed"), BUGS, ids=lambda value: value.name if isinstance(value, Patch) else "")
def test_a_seeded_bug_is_found(bug: Patch, seed: int):
    simulation = Simulation(with_slots(draw(seed)), bug)
    with pytest.raises(Broken):
        simulation.run(400)
