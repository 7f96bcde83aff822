"""What the simulator's tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _without_log() -> Iterator[None]:
    """Failures on purpose are thousands, and a traceback of each would be written."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
