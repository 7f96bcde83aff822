"""Requests with a bank of patterns, alone or behind other slots: every invariant, as elsewhere."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from .options import LADDERS, Options
from .test_many_rungs import LADDERS as LONG_LADDERS
from .test_simulator import describe, swarm


def with_bank(options: Options) -> Options:
    """The same options with patterns and rungs to seal on, sometimes many, and the slabs that slots begin."""
    rng = random.Random(options.seed)
    sizes = rng.choice([sizes for sizes in LADDERS if len(sizes) > 1] + [*LONG_LADDERS[:2]])
    slots = tuple(rng.choice((1, 3, *sizes)) for _ in range(rng.randint(1, 2)))
    reserve = min(len(sizes) - 1, 2)
    least = 2 + len(sizes) + (options.sink > 0)
    return replace(
        options, sizes=sizes, reserve=reserve, slabs=max(options.slabs, least) + len(slots), other_slots=slots,
        num_patterns=rng.choice((1, 3, 40, 255)), admit_at=rng.choice((len(sizes) - 1, rng.randrange(len(sizes)))),
        eager=rng.random() < 0.5,
    )  # fmt: skip


def check(report: list[str], seeds: range, num_events: int) -> None:
    started = time.monotonic()
    total, digest = swarm(seeds, num_events, with_bank)
    report.append(f"{total['mined']:,} banks mined; " + describe(seeds, total, digest, time.monotonic() - started))
    assert not total["hit"]
    for kind in ("mined", "demotion", "copy", "preempted", "recover", "refused", "end of"):
        assert total[kind], f"the loads show no {kind}"


def test_banks_keep_every_invariant(report: list[str]):
    check(report, range(600, 660), 400)


@pytest.mark.slow
def test_banks_for_long(report: list[str]):
    check(report, range(2000, 2500), 500)
