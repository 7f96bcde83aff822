"""Random loads on changed configurations: every invariant, as elsewhere, and bugs that only they show."""

from __future__ import annotations

import time

import pytest

from .broken import Broken
from .cases import CASES
from .disk import FakeDisk
from .mutants_cases import BUGS, Bug
from .mutants_disk import DISK_BUGS, DOUBT_BUGS, HINT_BUGS
from .mutants_groups import GROUP_BUGS
from .mutants_host import HOST_BUGS
from .mutants_resizes import RESIZE_BUGS
from .mutants_shares import SHARE_BUGS
from .mutants_shrinks import SHRINK_BUGS
from .mutants_states import STATE_BUGS
from .options import draw
from .simulator import Simulation, simulate
from .test_simulator import describe, swarm

NUM_EVENTS = 400  # of a seeded bug


def check(name: str, seeds: range, num_events: int, report: list[str]) -> None:
    """Runs a case, and sees that every kind of event came up that should."""
    case, started = CASES[name], time.monotonic()
    total, digest = swarm(seeds, num_events, case.change)
    mined = f"{total['mined']:,} banks mined, " if total["mined"] else ""
    report.append(f"{name}: {mined}{describe(seeds, total, digest, time.monotonic() - started)}")
    for kind in case.shows:
        assert total[kind], f"the loads show no {kind}"
    for kind in case.lacks:
        assert not total[kind], f"the loads show {kind}"


@pytest.mark.parametrize("name", CASES)
def test_every_invariant_is_kept(name: str, report: list[str]):
    check(name, CASES[name].few, CASES[name].num_events, report)


def test_every_invariant_is_kept_if_the_disk_is_not_looked_at_for_some_steps(monkeypatch: pytest.MonkeyPatch):
    def wait(disk: FakeDisk, seconds: float) -> bool:
        disk.poll()
        return disk.rng.random() < 0.3

    monkeypatch.setattr(FakeDisk, "wait", wait)
    total, _ = swarm(range(12100, 12106), NUM_EVENTS, CASES["disk"].change)
    assert total["read"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_invariant_is_kept_for_long(name: str, report: list[str]):
    check(name, CASES[name].many, 500, report)


@pytest.mark.parametrize(
    "bug",
    (
        *BUGS,
        *GROUP_BUGS,
        *RESIZE_BUGS,
        *SHRINK_BUGS,
        *HOST_BUGS,
        *DISK_BUGS,
        *DOUBT_BUGS,
        *HINT_BUGS,
        *SHARE_BUGS,
        *STATE_BUGS,
    ),
    ids=lambda bug: f"{bug.case}: {bug.name}",
)
def test_a_seeded_bug_is_found(bug: Bug):
    simulation = Simulation(CASES[bug.case].change(draw(bug.seed)), bug)
    with pytest.raises(Broken):
        simulation.run(NUM_EVENTS)


def test_a_read_does_not_wait_for_copies_that_keep_coming():
    """While all wait for the disk, and each step copies idle blocks to the host, which gives them up again."""
    assert simulate(4_000_009, 600, CASES["doubts"].change).counts["read"]


def test_a_cached_block_makes_room_though_its_neighbour_of_another_group_is_in_use():
    """Else a lone request preempts itself."""
    assert not simulate(2_000_240, 600, CASES["groups"].change).counts["preempted"]
