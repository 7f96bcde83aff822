"""An interrupt at every executed line of core, scheduler and books: recovery always leads to the same answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from qkv_engine.request import FinishReason, SamplingParams

from .broken import Broken
from .cases import with_groups
from .code import MODULES, source_path
from .options import Options, draw
from .simulator import Simulation

FILES = {str(source_path(file)) for file in MODULES}


class Interrupted(BaseException):
    """Like ``KeyboardInterrupt``."""


class LineCounter:
    """A trace function that raises at one line, or only counts them."""

    def __init__(self, raise_at: int | None):
        self.raise_at, self.count = raise_at, 0
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: Any, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.count += 1
            if self.raise_at is None:
                self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if self.count == self.raise_at:
                raise Interrupted
        return self


class Scenario(Simulation):
    """A handful of requests and an abort, done again where an interrupt left off; nothing else is random."""

    def __init__(self, options: Options):
        super().__init__(options)
        rng = random.Random(options.seed)
        self.to_come = [self._submission(i, rng) for i in range(5)]
        self.aborted = self.to_come[2]
        self.interrupts = 0

    def _submission(self, index: int, rng: random.Random) -> Any:
        block, same = self.options.block, random.Random(self.options.seed)
        ids = [same.randrange(50) for _ in range(2 * block + 1)] + [
            rng.randrange(50) for _ in range(rng.randint(1, 3 * block))
        ]
        params = SamplingParams(max_tokens=1, ignore_eos=index % 2 == 0, kv_pinned=index == 3)
        seed = rng.randrange(2**32)
        floor = self.options.floor(params)
        return self.code.Submission(f"r{index}", None, ids, params, block + 2, seed, [], index % 2 == 1, floor=floor)

    def event(self, *what: Any) -> None:
        """Checks while nothing was interrupted and after each recovery; not traced."""
        trace = sys.gettrace()
        sys.settrace(None)
        super().event(*what)
        sys.settrace(trace)

    def advance(self, step: int) -> None:
        """One round of the loop: commands, each taken out once done, and a step."""
        if self.to_come:
            submission = self.to_come[0]
            self.core.live[submission.request_id] = submission
            self.core.add(submission)
            if submission.request_id not in self.submissions:
                self._note_submission(submission)
            del self.to_come[0]
        if step >= 4:
            self.core.abort(self.aborted.request_id)
        self.step()

    def play(self, raise_at: int | None) -> LineCounter:
        """The whole scenario with an interrupt at the given line."""
        counter = LineCounter(raise_at)
        for step in range(3000):
            if not self.to_come and not self.scheduler.has_work:
                break
            if not self.interrupts:
                sys.settrace(counter)
            try:
                self.advance(step)
            except Interrupted:
                self.interrupts += 1
                sys.settrace(None)
                self.mend()
            finally:
                sys.settrace(None)
        assert not self.scheduler.has_work and not self.model.truths
        self.finish_all()
        return counter

    def mend(self) -> None:
        """Notes submissions that this side of the call had not noted; then everything starts over."""
        self._note_all()
        for line in (2, 9, 30, 80, None):  # the recovery is interrupted as well
            sys.settrace(LineCounter(line))
            with suppress(Interrupted):
                self.core.recover()
            sys.settrace(None)
        for submission in list(self.core.live.values()):
            self.core.add(submission)  # as the loop does with a command that broke off
        self._note_all()
        self.recover()

    def _note_all(self) -> None:
        for submission in self.core.live.values():
            for request in [c.request for c in submission.completions]:
                if request.request_id not in self.submissions:
                    self.submissions[request.request_id] = submission
                    self.model.begin(request)
        for request, truth in self.model.truths.items():
            truth.emitted = tuple(request.output_token_ids)


def scenario(number: int) -> Options:
    """Small and full of pressure: one to four rungs, with sinks, windows, eager, and a shared prefix."""
    base, rng = draw(number), random.Random(number)
    sizes = ((16, 8, 4), (16,), (16, 9), (16, 9, 5, 3))[number % 4]
    return replace(
        base, block=4, sizes=sizes, sink=(0, 1, 2, 4)[number // 2 % 4], recent=(0, 3)[number % 2], prefix=True,
        eager=number % 4 == 2, admit_at=len(sizes) - 1, slabs=10 + rng.randint(0, 4), slab_blocks=1 + number % 3,
        budget=13, max_num_seqs=4, quota=None, aborts=0.0, forks=0.0, faults=0.0, bad_blocks=0.0, recoveries=0.0,
        evacuations=0.0, ahead=number % 3 == 1,
    )  # fmt: skip


def scenario_of_groups(number: int) -> Options:
    """The same with a second group of layers, and windows in one of them or both."""
    return with_groups(scenario(number))


Lines = set[tuple[str, int]]


def sweep(number: int, times: int, done: Lines, make: Callable[[int], Options], every: int = 1) -> tuple[int, Lines]:
    """Interrupts each line that a scenario executes, up to ``times`` times; returns how often, and the lines.

    Lines that are ``done`` are left out, and of the others all but one in ``every``.
    """
    options = make(number)
    calm = Scenario(options)
    executed: dict[tuple[str, int], list[int]] = {}
    for at, line in enumerate(calm.play(None).lines, 1):
        executed.setdefault(line, []).append(at)
    points = sorted(
        at
        for line, found in executed.items()
        if line not in done
        for at in found[number % 3 :: -(-len(found) // times)] or found[:1]
    )
    for at in points[::every]:
        disturbed = Scenario(options)
        try:
            disturbed.play(at)
        except (Exception, Broken) as error:
            error.add_note(f"interrupted at line event {at} of scenario {number}")
            raise
        assert disturbed.interrupts == 1
        for name, (tokens, reason) in calm.outputs.items():
            found, why = disturbed.outputs[name]
            if FinishReason.ABORT in (reason, why):
                size = min(len(tokens), len(found))
                assert found[:size] == tokens[:size]
            else:
                assert (found, why) == (tokens, reason), f"{name} answers otherwise after an interrupt"
    return len(points[::every]), set(executed)


def sweeps(
    numbers: range,
    times: int,
    *,
    each_line_once: bool = False,
    every: int = 1,
    make: Callable[[int], Options] = scenario,
) -> tuple[int, str]:
    points, lines = 0, Lines()
    for number in numbers:
        found, executed = sweep(number, times, lines if each_line_once else Lines(), make, every)
        points += found
        lines |= executed
    return points, f"{points:,} interrupts at {len(lines)} lines in {len(numbers)} scenarios, 0 corrupt after recovery"


def test_an_interrupt_at_every_sixth_line(report: list[str]):
    points, line = sweeps(range(4, 6), 1, each_line_once=True, every=6)
    report.append(line)
    assert points >= 85


@pytest.mark.slow
def test_an_interrupt_at_lines_of_two_groups(report: list[str]):
    points, line = sweeps(range(2, 3), 1, each_line_once=True, make=scenario_of_groups)
    report.append(f"two groups: {line}")
    assert points >= 400


@pytest.mark.slow
def test_an_interrupt_at_each_line_many_times(report: list[str]):
    points, line = sweeps(range(16), 2)
    report.append(line)
    assert points >= 4_000
