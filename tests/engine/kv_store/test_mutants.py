"""The checks checked: every seeded bug is found."""

from __future__ import annotations

import pytest

from .code import parsed
from .hunt import hunt
from .mutants import MUTANTS, QUICK


@pytest.mark.parametrize("name", QUICK)
def test_a_seeded_bug_is_found(name: str):
    assert hunt(MUTANTS[name]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in QUICK])
def test_every_seeded_bug_is_found(name: str, report: list[str]):
    found = hunt(MUTANTS[name])
    assert found is not None, f"{name!r} lives"
    report.append(f"mutant {MUTANTS[name].file:9} {name:50} {found.splitlines()[0][:80]}")


def test_every_seeded_bug_has_its_place_in_the_source():
    for mutant in MUTANTS.values():
        parsed(mutant.file, mutant)


def test_the_list_is_long():
    assert len(MUTANTS) >= 80
