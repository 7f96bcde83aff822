"""Requests that arrive one by one: steps are told from tokens' times, and counted for what happened in them."""

from __future__ import annotations

import pytest

from qkv_engine import RequestOutput
from qkv_engine.request import CompletionOutput, RequestMetrics
from studies.arrivals import Sample, main, steps


def output(*times: float) -> RequestOutput:
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[5],
        outputs=[CompletionOutput(index=0, text="", token_ids=[7] * len(times))],
        finished=True,
        metrics=RequestMetrics(token_times=list(times)),
    )


def test_tokens_that_come_together_are_one_step():
    found = steps(
        [output(1.0, 2.0, 3.5), output(2.0001, 3.5002)], [Sample(0.0, 0, 0), Sample(2.5, 4, 0), Sample(3.4, 4, 64)]
    )
    assert [round(step.ms) for step in found] == [1000, 1500]
    assert [(step.demotions, step.prompt_tokens) for step in found] == [(0, 0), (4, 64)]


def test_a_row_a_preset(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    options = "--kv bf16,auto --kv-memory 8MiB --rate 50 --requests 3 --input-len 20 --output-len 4"
    monkeypatch.setattr("sys.argv", ["arrivals", *options.split()])
    main()
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0] == "kv" and rows[2:] == ["bf16", "auto"]
