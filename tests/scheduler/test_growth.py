"""Work of a step grows in proportion to its requests, counted in lines that run: a loop within a loop stands out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from qkv_engine.kv.spec import KVSpec
from qkv_engine.request import FinishReason
from qkv_engine.scheduler import Scheduler

from .common import BLOCK, DENSE, LADDER, make_request, make_scheduler, run

FEW, MANY = 64, 1024  # requests
NEW = 64  # requests that arrive
SPECS = pytest.mark.parametrize("spec", [DENSE, LADDER], ids=["dense", "ladder"])


def num_lines(function: Callable[[], object]) -> int:
    """Lines of Python that ``function`` runs, each round of a loop counted; the same number in every run."""
    number = 0

    def note(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal number
        number += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    return number


def decoding(number: int, spec: KVSpec, prompt: int = 8) -> Scheduler:
    """A scheduler with ``number`` requests that decode, and room for ``NEW`` short ones."""
    scheduler = make_scheduler(4 * (number + NEW), spec, seqs=number + NEW, budget=prompt * (number + NEW))
    add(scheduler, number, spec, prompt)
    run(scheduler, scheduler.schedule())
    assert len(scheduler.running) == number
    return scheduler


def add(scheduler: Scheduler, number: int, spec: KVSpec, prompt: int = 8) -> None:
    for _ in range(number):
        name = f"r{len(scheduler.requests)}"
        scheduler.add(make_request(name, prompt, 100, floor=len(spec.main.floors) - 1))


@SPECS
@pytest.mark.parametrize("prompt", [8, BLOCK], ids=["within a block", "a new block each"])
def test_a_step_is_linear_in_its_decodes(spec: KVSpec, prompt: int) -> None:
    few, many = (num_lines(decoding(number, spec, prompt).schedule) for number in (FEW, MANY))
    assert 0.9 * MANY / FEW < many / few < 1.1 * MANY / FEW


def test_a_step_that_lacks_memory_is_linear_in_its_decodes() -> None:
    """Each request begins a block, for which others step down."""

    def lines(number: int) -> int:
        scheduler = make_scheduler(1.6 * number, LADDER, seqs=number, budget=2 * BLOCK * number)
        add(scheduler, number, LADDER, 2 * BLOCK)
        run(scheduler, scheduler.schedule())
        for request in list(scheduler.waiting):
            scheduler.finish(request, FinishReason.ABORT)
        assert len(scheduler.running) > number // 2
        return num_lines(scheduler.schedule)

    few, many = lines(FEW), lines(MANY)
    assert many < 1.2 * few * MANY / FEW, (few, many)


@SPECS
def test_admission_does_not_look_at_those_that_run(spec: KVSpec) -> None:
    def lines(number: int) -> int:
        """Of admitting ``NEW`` requests beside ``number``."""
        scheduler = decoding(number, spec)
        add(scheduler, NEW, spec)
        both = num_lines(scheduler.schedule)
        assert len(scheduler.running) == number + NEW
        return both - num_lines(decoding(number, spec).schedule)

    few, many = lines(FEW), lines(MANY)
    assert NEW < many < 1.3 * few, (few, many)


def test_admission_that_lacks_memory_looks_once_at_those_that_run() -> None:
    """Each request that arrives starts because others step down."""

    def lines(number: int, arriving: int) -> int:
        """Of a step beside ``number`` requests that fill the memory with two blocks each."""
        scheduler = make_scheduler(2 * number + 8, LADDER, seqs=number + NEW, budget=2 * BLOCK * (number + NEW))
        add(scheduler, number, LADDER, 2 * BLOCK)
        run(scheduler, scheduler.schedule())
        add(scheduler, arriving, LADDER, 2 * BLOCK)
        total = num_lines(scheduler.schedule)
        assert len(scheduler.running) == number + arriving
        return total

    few, many = (lines(number, NEW) - lines(number, NEW // 4) for number in (4 * FEW, MANY))
    assert many < 1.3 * few, (few, many)


@SPECS
def test_requests_that_have_to_wait_cost_a_step_nothing(spec: KVSpec) -> None:
    def lines(waiting: int) -> int:
        scheduler = decoding(FEW, spec)
        add(scheduler, NEW + waiting, spec)
        run(scheduler, scheduler.schedule())
        assert len(scheduler.waiting) == waiting
        return num_lines(scheduler.schedule)

    few, many = lines(FEW), lines(MANY)
    assert many < 1.1 * few, (few, many)
