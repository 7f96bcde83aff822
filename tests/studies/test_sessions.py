"""Conversations that come back: how much is found and computed again, by the way in which idle blocks make room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import sessions, tiers_plot
from studies.sessions import HOSTED, POLICIES, STATE_POLICIES, Load, Run, SessionsRow, sessions_table

SMALL = Load("small", 2.5, conversations=6, turns=4, first=600, more=300, answer=40, pause=300)


def rows(load: Load) -> tuple[SessionsRow, SessionsRow]:
    given_up, stepped_down = (Run(load, policy).finish() for policy in list(POLICIES)[:2])
    assert given_up.known == stepped_down.known and given_up.preemptions == stepped_down.preemptions == 0
    return given_up, stepped_down


def test_stepping_down_first_finds_more_and_costs_running_requests_nothing():
    given_up, stepped_down = rows(SMALL)
    assert given_up.idle_demotions == 0 < stepped_down.idle_demotions
    assert stepped_down.recomputed <= 0.35 * given_up.recomputed
    assert stepped_down.demotions <= given_up.demotions
    assert given_up.mean_hit_bits == 16 > stepped_down.mean_hit_bits
    assert sum(stepped_down.hits_by_rung.values()) == stepped_down.hits


def test_a_host_tier_leaves_nothing_to_compute_again():
    load = SMALL._replace(memory_for=1)
    row = Run(load, HOSTED).finish()
    assert row.recomputed == 0 < Run(load, "stepped down first").finish().recomputed
    assert row.fetched_nbytes > 0 and row.written_nbytes > 0


def test_checkpoints_of_states_are_given_up_by_their_age():
    load = Load("hybrid", 6, conversations=8, turns=4, first=1200, pause=400, states=True)
    found = {policy: Run(load, policy).finish().hits for policy in STATE_POLICIES}
    assert found["stepped down first"] > found["given up whole"] > found["behind all checkpoints"]


def test_pinned_conversations_and_windows_lose_nothing_by_it():
    for load in (SMALL._replace(pinned=3), SMALL._replace(window=256, memory_for=4)):
        given_up, stepped_down = rows(load)
        assert stepped_down.hits >= given_up.hits > 0


def test_a_run_is_the_same_each_time():
    assert Run(SMALL, "stepped down first").finish() == Run(SMALL, "stepped down first").finish()


def test_the_table_has_a_line_for_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sessions, "LOADS", (SMALL,))
    assert sessions.main(["-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in found] == list(POLICIES)
    table = sessions_table(list(rows(SMALL)))
    assert [line[0] for line in table.cells] == ["small", "small"]


def test_three_tiers_lose_nothing_and_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    load, picture = SMALL._replace(memory_for=1), tmp_path / "tiers.png"
    assert tiers_plot.main(["--output", str(picture)], load) == 0
    assert "computed again 0" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
