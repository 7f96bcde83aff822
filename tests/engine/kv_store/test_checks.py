"""The checks on the real code; ``test_mutants.py`` has them find bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import checks_folder, checks_store
from .code import Code, load

CHECKS = [
    check
    for module in (checks_folder, checks_store)
    for name, check in sorted(vars(module).items())
    if name.startswith("check_")
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test(check: Callable[[Code, Path], None], tmp_path: Path):
    check(load(), tmp_path / "store")
