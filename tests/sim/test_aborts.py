"""Thousands of aborts at random moments: nothing leaks, and all other requests answer as if alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .options import Options, draw
from .simulator import Simulation


def restless(seed: int) -> Options:
    """Many short requests, most of which are aborted while they wait, read their prompt or write."""
    options = draw(seed)
    return replace(
        options, block=4, sink=min(options.sink, 4), longest=min(options.longest, 6), budget=max(8, options.budget),
        arrivals=1.0, forks=0.7, aborts=1.0, open_ended=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("number", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_aborts_leak_nothing(number: int, report: list[str]):
    aborts = seed = 0
    while aborts < number:
        simulation = Simulation(restless(seed))
        for _ in range(60):
            for request in list(simulation.scheduler.requests.values()):
                if simulation.rng.random() < 0.3:
                    simulation.abort(request)
            simulation._chaos()
            simulation.step()
        simulation.finish_all()  # checks that every byte is free
        aborts += sum(reason == "abort" for _, reason in simulation.outputs.values())
        seed += 1
    report.append(f"{aborts:,} aborts in {seed} configurations, 0 bytes leaked")
