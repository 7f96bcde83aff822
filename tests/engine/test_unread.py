"""Tokens that are read later: whoever waits for the end of a request cannot tell."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from qkv_engine import RequestOutput, SamplingParams
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission
from qkv_engine.serving.unread import MOST_UNREAD, PATIENCE, Unread
from qkv_engine.startup import Started
from qkv_engine.text.reasoning import OutputText

from .test_run_ahead import begin, make_core, seen

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def submission(name: str, params: SamplingParams, max_tokens: int, incremental: bool = False) -> Submission:
    rng = random.Random(name)
    ids = [rng.randrange(5, 1000) for _ in range(rng.choice((3, 20, 70, 130)))]
    return Submission(name, None, ids, params, max_tokens, rng.randrange(100), [], incremental)


def quiet_load() -> list[Submission]:
    """Requests that end in all the ways in which one can that is not watched."""
    rng, load = random.Random(3), []
    for i in range(16):
        max_tokens = rng.choice((1, 2, 40, 90, 140))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.9)),
            ignore_eos=i % 2 == 0,
            stop_token_ids=[rng.randrange(5, 1000) for _ in range(8)] if i % 3 == 0 else None,
            min_tokens=5 if i == 9 else 0,
            presence_penalty=0.2 if i == 5 else 0.0,
            n=2 if i in (4, 7) else 1,
            detokenize=i != 8,
            include_stop_str_in_output=i == 6,
        )
        load.append(submission(f"r{i}", params, max_tokens))
    return [*load, submission("long", SamplingParams(**GREEDY), 400)]


def serve(
    core: EngineCore, arrivals: Mapping[int, Sequence[Submission]], aborts: Mapping[int, str] | None = None
) -> list[RequestOutput]:
    """Submits and aborts at steps; returns the answers in order of arrival."""
    step = 0
    while core.has_work or step <= max(arrivals):
        for arrived in arrivals.get(step, ()):
            core.live[arrived.request_id] = arrived
            core.add(arrived)
        if aborts and step in aborts:
            core.abort(aborts[step])
        core.step()
        step += 1
        for live in core.live.values():
            for completion in live.completions:
                request = completion.request
                assert request.num_output_tokens - completion.num_read <= MOST_UNREAD
                # Full blocks are filed at once.
                assert not request.num_output_tokens or request.files_at >= len(request.token_ids)
    assert not core._owners and core._unread.is_empty
    return [answered.stream.get(0) for step in sorted(arrivals) for answered in arrivals[step]]


@pytest.fixture(scope="module")
def started() -> Started:
    return begin("fp32", "128MiB", max_num_batched_tokens=512, max_num_seqs=24)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step gave that was taken."""
    take, found = Unread.take, list[int]()

    def noted(unread: Unread, result: Any, *args: Any) -> bool:
        if take(unread, result, *args):
            found.append(len(result.items))
            return True
        return False

    monkeypatch.setattr(Unread, "take", noted)
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_are_those_of_tokens_read_at_once(
    ahead: bool, started: Started, taken: list[int], monkeypatch: pytest.MonkeyPatch
):
    def answers() -> list[list[Any]]:
        core = make_core(started, ahead)
        late = [submission("late", SamplingParams(**GREEDY), 60), submission("odd", SamplingParams(**GREEDY), 50, True)]
        load = {0: quiet_load(), 70: late[:1], 250: late[1:]}
        outputs = serve(core, load, {55: "r10", 100: "late", 330: "long"})
        for output in outputs:
            times = output.metrics.token_times
            assert times == sorted(times) and times[0] >= output.metrics.first_token_time
            assert len(output.outputs) > 1 or times[-1] == output.metrics.last_token_time
        generated = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        assert core.counters.generation_tokens == generated
        return [*(seen(output) for output in outputs), [len(core.space.prefix)]]

    mine = answers()
    assert len(taken) > 150 and sum(taken) > 500 and max(taken) > 8
    reasons = {reason for answer in mine for reason in answer if isinstance(reason, str)}
    assert {"length", "stop", "abort"} <= reasons
    monkeypatch.setattr(Unread, "take", lambda *args: False)
    assert mine == answers()


def test_no_step_is_taken_while_one_request_is_watched(started: Started, taken: list[int]):
    quiet = SamplingParams(**GREEDY)
    for watched in (
        submission("stream", quiet, 20, True),
        submission("stop", SamplingParams(stop="qqq", **GREEDY), 20),
        submission("logprobs", SamplingParams(logprobs=1, **GREEDY), 20),
    ):
        serve(make_core(started, True), {0: [submission("a", quiet, 20), watched]})
        assert not taken
    serve(make_core(started, True), {0: [submission("a", quiet, 20), submission("b", quiet, 30)]})
    # The step that "b" runs alone while the last token of "a" is in flight is no cohort's.
    assert taken == [2] * (18 - PATIENCE) + [1] * (8 - PATIENCE)


def test_a_lone_request_is_taken_from_block_to_block(started: Started, taken: list[int]):
    serve(make_core(started, True), {0: [submission("long", SamplingParams(**GREEDY), 450)]})
    assert taken == [1] * (448 - PATIENCE)


def test_what_cannot_be_read_fails_its_request_alone(
    started: Started, taken: list[int], monkeypatch: pytest.MonkeyPatch
):
    load = [submission(f"r{i}", SamplingParams(**GREEDY), 60) for i in range(4)]
    expected = serve(make_core(started, True), {0: load})
    push = OutputText.push

    def broken(self: OutputText, token_id: int) -> None:
        if self is bad.completions[0].output_text and bad.completions[0].request.num_output_tokens > 20:
            raise ValueError("injected")
        push(self, token_id)

    monkeypatch.setattr(OutputText, "push", broken)
    load = [submission(f"r{i}", SamplingParams(**GREEDY), 60) for i in range(4)]
    bad, core = load[1], make_core(started, True)
    outputs = serve(core, {0: load})
    assert core.counters.num_failed == 1 and "injected" in outputs[1].error
    tokens, text = outputs[1].outputs[0].token_ids, outputs[1].outputs[0].text
    assert 20 < len(tokens) <= 20 + MOST_UNREAD and tokens == expected[1].outputs[0].token_ids[: len(tokens)]
    assert expected[1].text.startswith(text)
    for i in (0, 2, 3):
        assert seen(outputs[i]) == seen(expected[i])
    assert sum(taken) > 300
