"""The checks on the real code; ``test_mutants.py`` has them find bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .code import Code, load
from .hunt import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test(check: Callable[[Code, Path], None], tmp_path: Path):
    check(load(), tmp_path / "store")
