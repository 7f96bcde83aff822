"""The store beside a dict, under a size limit, with restarts, crashes and damage between them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from .model import FAVOURITE, KINDS, STEPS, CheckedStore

NUMBERS = st.integers(0, 40)


class StoreMachine(RuleBasedStateMachine):
    """Operations in any order; each is checked by ``CheckedStore``."""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = CheckedStore(self.folder / "store")
        self.store.put(FAVOURITE)

    @rule()
    def put_favourite(self) -> None:
        self.store.put(FAVOURITE)

    @rule(number=NUMBERS, rungs=st.sampled_from(STEPS))
    def put(self, number: int, rungs: tuple[tuple[int, int], ...]) -> None:
        self.store.put(number, rungs)

    @rule(number=NUMBERS, length=st.integers(5, 20))
    def put_many(self, number: int, length: int) -> None:
        for each in range(number, number + length):
            self.store.put(each)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        self.store.read(number)

    @rule(number=NUMBERS, other=NUMBERS)
    def read_as_another(self, number: int, other: int) -> None:
        self.store.read_as_another(number, other)

    @rule()
    def reopen(self) -> None:
        self.store.reopen()

    @rule()
    def crash(self) -> None:
        self.store.crash()

    @rule(choice=NUMBERS, offset=st.integers(0, 2**17), kind=st.sampled_from(KINDS))
    def damage(self, choice: int, offset: int, kind: str) -> None:
        self.store.damage(choice, offset, kind)

    @invariant()
    def holds_what_it_should(self) -> None:
        self.store.check()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


def run(examples: int, steps: int) -> None:
    limits = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(StoreMachine, settings=limits)


def test_operations_in_any_order():
    run(12, 25)


@pytest.mark.slow
def test_many_operations_in_any_order():
    run(60, 40)
