"""The study of scheduling: every load runs and ends, with few requests as with many."""

from __future__ import annotations

import json

import pytest

from studies.schedule import LOADS, main


@pytest.mark.slow
def test_every_load_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--running", "24", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["load"] for row in rows] == list(LOADS)
    for row in rows:
        assert row["calls"] > 0 and 0 <= row["least_ms"] <= row["median_ms"] <= row["most_ms"] <= row["total_ms"] + 1e-9
