"""Ladders of many rungs, whose reserve is smaller than the number of narrower rungs: every invariant, as elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from .options import Options, draw
from .patch import Patch
from .simulator import Simulation
from .spy import Broken
from .test_simulator import check_loads

# Slot sizes of the rungs, widest first: even and uneven steps, sizes that divide no slab, near neighbours.
LADDERS = (
    (48, 44, 38, 31, 22, 12), (64, 33, 17, 9, 5, 3), (30, 29, 28, 27, 26, 25),
    (96, 88, 80, 71, 64, 57, 49, 41, 32, 26, 19, 13), (40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18),
)  # fmt: skip

# A bug, and a seed that shows it.
BUGS = (
    (
        Patch(
            "floors do not count",
            "table",
            "BlockTables._reserve_for",
            "return max(self._least_reserve, reserve_nbytes(rungs, self.arena.slab_nbytes, num_floors))",
            "return max(self._least_reserve, reserve_nbytes(rungs, self.arena.slab_nbytes))",
        ),
        5,
    ),
    (
        Patch("the order of blocks that went further is kept", "pressure", "Pressure._demote", "self.forget()", "pass"),
        31,
    ),
    (
        Patch(
            "a block goes no further than it was sent",
            "table",
            "BlockTables.demote",
            "range(wanted, block.floor + 1)",
            "(wanted,)",
        ),
        224,
    ),
    (
        Patch(
            "a request gives way at once",
            "pressure",
            "Pressure.make_room",
            "not found and (not self._step_down_any(request.params.tenant))",
            "not found",
        ),
        287,
    ),
)


def many_rungs(options: Options) -> Options:
    """The same options with a ladder of 6 or 12 rungs and the reserve of the engine."""
    rng = random.Random(options.seed)
    sizes = rng.choice(LADDERS)
    return replace(
        options, sizes=sizes, slabs=max(options.slabs, 4 + (options.sink > 0)),
        admit_at=rng.choice((len(sizes) - 1,) * 4 + (rng.randrange(len(sizes)),)), eager=rng.random() < 0.2,
    )  # fmt: skip


def test_ladders_of_many_rungs_keep_every_invariant(report: list[str]):
    check_loads(report, range(100, 130), 400, many_rungs)


@pytest.mark.slow
def test_ladders_of_many_rungs_for_long(report: list[str]):
    check_loads(report, range(650, 1150), 500, many_rungs)


@pytest.mark.parametrize(("bug", "seed"), BUGS, ids=lambda value: value.name if isinstance(value, Patch) else "")
def test_a_seeded_bug_is_found(bug: Patch, seed: int):
    simulation = Simulation(many_rungs(draw(seed)), bug)
    with pytest.raises(Broken):
        simulation.run(400)
