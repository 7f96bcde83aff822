"""The core after an interrupt in the middle of a step: text, stops and log-probabilities are as without one."""

from __future__ import annotations

import pytest

from qkv_engine import Engine, RequestOutput, SamplingParams
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission

PROMPT = "What is 47*86?"
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1),
    SamplingParams(seed=3, max_tokens=30, stop=["e", "a", "4", "1"]),
    SamplingParams(seed=4, max_tokens=8, repetition_penalty=1.3, presence_penalty=0.2),
    SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
    SamplingParams(seed=5, n=2, max_tokens=6, ignore_eos=True),
]


class Interrupted(BaseException):
    """Like ``KeyboardInterrupt``."""


def submissions(engine: Engine) -> list[Submission]:
    ids, floor = engine.tokenizer.encode(PROMPT), engine._started.core.scheduler.space.num_rungs - 1
    return [
        Submission(f"r{i}", PROMPT, ids, params, params.max_tokens, params.seed or 0, [], incremental=True, floor=floor)
        for i, params in enumerate(PARAMS)
    ]


def play(core: EngineCore, work: list[Submission], interrupt: int) -> list[RequestOutput]:
    """Runs everything; the call of ``append_token`` with this number is interrupted, before or after it is done."""
    append, calls = core.scheduler.append_token, 0

    def interrupted(*args) -> None:
        nonlocal calls
        calls += 1
        if calls == interrupt and interrupt % 2:
            raise Interrupted
        append(*args)
        if calls == interrupt:
            raise Interrupted

    core.scheduler.append_token = interrupted
    try:
        for submission in work:
            core.live[submission.request_id] = submission
            core.add(submission)
        while core.has_work:
            try:
                core.step()
            except Interrupted:
                core.recover()
    finally:
        del core.scheduler.append_token
    assert calls >= interrupt and not core.live and not core.registry.owners and not core.registry.rows
    return [submission.stream.get(0) for submission in work]


def seen(output: RequestOutput) -> list[object]:
    found = []
    for completion in output.outputs:
        logprobs = [list(entry) for entry in completion.logprobs or ()]
        total = completion.cumulative_logprob
        found += [completion.token_ids, completion.text, completion.delta, completion.finish_reason]
        found += [completion.stop_reason, logprobs, None if total is None else pytest.approx(total, abs=1e-4)]
    times = len(output.metrics.token_times)
    return [*found, times, output.finished, [entry and list(entry) for entry in output.prompt_logprobs or ()]]


def test_answers_are_the_same_wherever_a_step_is_interrupted(small_engine: Engine):
    core = small_engine._started.core
    expected = small_engine._loop.call(lambda: [seen(o) for o in play(core, submissions(small_engine), 0)])
    assert expected[1][4] is not None and expected[0][3] == "length"
    for interrupt in (*range(1, 9), *range(9, 30, 3)):  # odd and even ones by turns
        found = small_engine._loop.call(
            lambda at=interrupt: [seen(o) for o in play(core, submissions(small_engine), at)]
        )
        assert found == expected, f"interrupted at token {interrupt}"


def test_a_command_that_breaks_off_is_done_again(small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    core = small_engine._started.core
    add, calls = core.add, []

    def flaky(submission: Submission) -> None:
        calls.append(submission)
        if len(calls) in (1, 3):
            raise KeyError("injected")
        add(submission)

    monkeypatch.setattr(core, "add", flaky)
    outputs = small_engine.generate([[5, 6], [7, 8]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert len(calls) == 5  # the first breaks off, is added, and is added again because the second broke off
