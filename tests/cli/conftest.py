"""What tests of the terminal share."""

from __future__ import annotations

import pytest

from qkv_engine.cli.chat.shell import Shell

from .shells import make_shell


@pytest.fixture
def shell() -> Shell:
    return make_shell()
