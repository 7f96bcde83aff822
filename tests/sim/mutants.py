"""Mutation tests: the simulator has to find each bug put in on purpose.

A surviving bug shows a missing invariant. Bugs without any visible effect are not in the list.
"""

from __future__ import annotations

from itertools import chain, count

from .broken import Broken
from .mutants_books import BOOKS
from .mutants_core import CORE
from .mutants_idle import IDLE
from .mutants_scheduling import SCHEDULING
from .options import draw
from .patch import Patch
from .simulator import OutOfEvents, Simulation

MUTANTS = {patch.name: patch for patch in (*BOOKS, *SCHEDULING, *IDLE, *CORE)}

QUICK = (  # tried by make test: bugs of every module, found soon
    "a slot is handed out twice",
    "packed slabs are rounded down",
    "an old slot is freed within its wave",
    "a wave is lost",
    "a floor outlives who asked for it",
    "a block is filed before it is full",
    "admission forgets what may still be written",
    "the hottest block steps down first",
    "cached blocks are given up last",
    "idle blocks are given up before they step down",
    "a narrow block is kept for good",
    "a failed request is released as a good one",
    "recovery does not look for stops",
)


RARE = {  # seeds that show bugs that need a coincidence, tried first
    "bad values stay on offer when their holder has ended": 1378,
    "holders of bad values go on": 1103,
    "who is left of a batch fails": 1048,
    "a hit may be narrower than the floor": 126,
    "idle blocks before one in use are kept": 287,
    "blocks are given up by an old age": 287,
    "blocks that others follow are given up in turn": 147,
    "a wide block gives way to a narrow one": 126,
}


def hunt(patch: Patch, limit: int = 50_000) -> tuple[int, str] | None:
    """Simulates until the bug shows: the events it took and the message; ``None`` if it survives ``limit`` events."""
    spent = 0
    first = [RARE[patch.name]] if patch.name in RARE else []
    for seed in chain(first, count()):
        simulation = Simulation(draw(seed), patch)
        simulation.limit = limit - spent
        try:
            simulation.run(400)
        except OutOfEvents:
            return None
        except (Exception, Broken) as error:
            return spent + simulation.num_events, f"{type(error).__name__}: {error}"
        spent += simulation.num_events
    return None
