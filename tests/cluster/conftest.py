"""Tests here start a cluster on this machine, whose parts talk to each other by its address."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _offline() -> None:
    """No guard: the cluster's connections are not Python's to watch."""
