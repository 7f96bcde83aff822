"""Ladders whose recent window is a share of what is computed, so that blocks grow old slower than requests grow."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from .options import LADDERS, Options, draw
from .patch import Patch
from .simulator import Simulation
from .spy import Broken
from .test_simulator import check_loads

FIXED_WINDOW = Patch(
    "admission forgets that the window grows",
    "table",
    "BlockTables.split",
    "older = self._newest(self.group.sink + (blocks - 1) * self.group.block_tokens)",
    "older = (blocks - 1) * self.group.block_tokens - self.group.recent.num_tokens",
)
RATIOS = tuple(Fraction(text) for text in ("0.1", "0.2", "0.3", "0.5", "0.77", "0.99"))


def with_ratio(options: Options) -> Options:
    """The same options with a ratio, and as many rungs that the window matters; half of them without fixed tokens."""
    rng = random.Random(options.seed)
    sizes = rng.choice([sizes for sizes in LADDERS if len(sizes) > 1])
    return replace(
        options, sizes=sizes, slabs=max(options.slabs, 2 + len(sizes) + (options.sink > 0)),
        admit_at=rng.choice((len(sizes) - 1,) * 4 + (rng.randrange(len(sizes)),)), eager=rng.random() < 0.5,
        recent=rng.choice((0, options.recent)), recent_ratio=rng.choice(RATIOS),
    )  # fmt: skip


def test_windows_by_ratio_keep_every_invariant(report: list[str]):
    check_loads(report, range(200, 230), 400, with_ratio)


@pytest.mark.slow
def test_windows_by_ratio_for_long(report: list[str]):
    check_loads(report, range(1200, 1700), 500, with_ratio)


def test_admission_with_a_window_that_does_not_grow_is_found_out():
    simulation = Simulation(with_ratio(draw(7)), FIXED_WINDOW)
    with pytest.raises(Broken):
        simulation.run(400)
