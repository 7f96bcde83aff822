"""The checker checked: every seeded bug is found."""

from __future__ import annotations

import pytest

from .code import parsed
from .mutants import MUTANTS, QUICK, hunt


def check(name: str, report: list[str]) -> None:
    mutant = MUTANTS[name]
    found = hunt(mutant)
    assert found is not None, f"{name!r} lives"
    report.append(f"mutant {mutant.file:9} {name:62} {found[0]:6,} events  {found[1].splitlines()[0][:80]}")


@pytest.mark.parametrize("name", QUICK)
def test_a_seeded_bug_is_found(name: str, report: list[str]):
    check(name, report)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in QUICK])
def test_every_seeded_bug_is_found(name: str, report: list[str]):
    check(name, report)


def test_every_seeded_bug_has_its_place_in_the_source():
    for mutant in MUTANTS.values():
        parsed(mutant.file, mutant)


def test_the_list_is_long():
    assert len(MUTANTS) >= 40
