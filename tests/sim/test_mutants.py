"""The checker checked: every seeded bug is found."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS, QUICK, hunt


def check(index: int, report: list[str]) -> None:
    mutant = MUTANTS[index]
    found = hunt(mutant)
    assert found is not None, f"{mutant.name!r} lives"
    report.append(f"mutant {mutant.file:9} {mutant.name:66} {found[0]:6,} events  {found[1][:80]}")


@pytest.mark.parametrize("index", QUICK)
def test_a_seeded_bug_is_found(index: int, report: list[str]):
    check(index, report)


@pytest.mark.slow
@pytest.mark.parametrize("index", [i for i in range(len(MUTANTS)) if i not in QUICK])
def test_every_seeded_bug_is_found(index: int, report: list[str]):
    check(index, report)


def test_the_list_is_long_and_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
