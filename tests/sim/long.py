"""Random loads for as long as one likes: ``python -m tests.sim.long --cases disk,hints --events 2000000 --jobs 8``.

Seeds go on from ``--first`` until the events of each case have been checked. A failure is printed with its seed and
options, and the others go on; the exit code is 1 if there was any.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

from tqdm import tqdm

from .broken import Broken
from .cases import CASES
from .simulator import simulate

RUN_EVENTS = 600  # of a seed: enough for a memory to fill and empty again
DEFAULT = "plain"


class Run(NamedTuple):
    """What a seed showed: the events that were checked, how many of each kind, and a failure's words."""

    num_events: int
    counts: Counter[str]
    failure: str = ""


def run(case: str, seed: int) -> Run:
    """One seed of a case, or of the loads without a change."""
    logging.disable(logging.CRITICAL)  # the scheduler tells of faults that are meant
    change = None if case == DEFAULT else CASES[case].change
    try:
        simulation = simulate(seed, RUN_EVENTS, change)
    except (Exception, Broken) as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return Run(0, Counter(), f"{case}, seed {seed}: {type(error).__name__}: {error}; {notes}")
    return Run(simulation.num_events, simulation.counts)


def runs(pool: ProcessPoolExecutor, case: str, first: int, num_events: int) -> Iterator[Run]:
    """Of as many seeds as the events need, in whatever order they end."""
    seeds = range(first, first - (-num_events // RUN_EVENTS))
    futures: list[Future[Run]] = [pool.submit(run, case, seed) for seed in seeds]
    for future in as_completed(futures):
        yield future.result()


def main(argv: list[str] | None = None) -> int:
    """Runs the cases; 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.long", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--cases", default=",".join((DEFAULT, *CASES)), metavar="LIST", help="default: %(default)s")
    add("--events", type=int, default=100_000, help="of each case (default: %(default)s)")
    add("--first", type=int, default=1_000_000, help="the first seed (default: %(default)s)")
    add("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    cases, num_failures = args.cases.split(","), 0
    if unknown := set(cases) - {DEFAULT, *CASES}:
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for case in cases:
            total, checked = Counter[str](), 0
            with tqdm(total=args.events, desc=case, unit=" events", disable=None) as bar:
                for done in runs(pool, case, args.first, args.events):
                    if done.failure:
                        num_failures += 1
                        print(done.failure, flush=True)
                    total += done.counts
                    checked += done.num_events
                    bar.update(done.num_events)
            counts = ", ".join(f"{number:,} {kind}" for kind, number in sorted(total.items()))
            print(f"{case}: {checked:,} events checked, {num_failures} failures so far; {counts}", flush=True)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
