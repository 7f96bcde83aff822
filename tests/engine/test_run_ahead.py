"""A core that runs a step ahead of the tokens it knows answers exactly as one that waits for each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from qkv_engine import RequestOutput, SamplingParams
from qkv_engine.config import EngineConfig
from qkv_engine.device.runner import Runner, StepResult
from qkv_engine.presets import resolve_kv
from qkv_engine.request import Request
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.scheduler import ScheduledBatch
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission
from qkv_engine.started import Started
from qkv_engine.startup import start

from ..small_demo import small_demo


class LateResults:
    """A step that was computed at once, and whose results nobody sees before ``wait``."""

    def __init__(self, result: StepResult, broken: bool):
        self.result, self.broken = result, broken

    def wait(self) -> StepResult:
        if self.broken:
            raise RuntimeError("injected")
        return self.result


class LateRunner:
    """The CPU's runner as if it were a GPU's: tokens in flight are known to it alone."""

    def __init__(self, runner: Runner):
        self.runner, self.cache, self.launch_moves = runner, runner.cache, runner.launch_moves
        self.num_ahead = 0
        self.last: dict[Request, int] = {}
        self.breaks: dict[str, str] = {}  # request ids, and where a step with their fifth token breaks off

    def check_device(self) -> None:
        """Never lost."""

    def launch(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> LateResults:
        places = {
            self.breaks.get(i.request.request_id) for i in batch.items if i.end >= i.request.num_prompt_tokens + 5
        }
        if "launch" in places:
            raise RuntimeError("injected")
        late = [item for item in batch.items if item.end > len(item.request.token_ids)]
        for item in late:
            assert item.num_tokens == 1
            item.request.token_ids.append(self.last[item.request])
        result = self.runner.launch(batch, rows).wait()
        for item in late:
            item.request.token_ids.pop()
        for item, token_id in zip(result.items, result.token_ids, strict=True):
            if token_id is not None:
                self.last[item.request] = token_id
        self.num_ahead += len(late)
        return LateResults(result, "wait" in places)

    def run(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> StepResult:
        return self.launch(batch, rows).wait()


def begin(kv: str, kv_memory: str, **options: Any) -> Started:
    defaults = {"kv_quota": None, "prefix_caching": True, "dtype": "float32", "device": "cpu", "max_model_len": 600}
    defaults |= {"max_num_seqs": 16, "max_num_batched_tokens": 64, "load_format": "auto", "seed": 0}
    defaults |= {"model": small_demo(), "revision": None, "token": None}
    return start(EngineConfig(**(defaults | options), kv=resolve_kv(kv), kv_memory=kv_memory))


def make_core(started: Started, ahead: bool) -> EngineCore:
    core = started.core
    core.recover()  # an empty prefix cache
    runner: Any = LateRunner(core.runner) if ahead else core.runner
    return EngineCore(core.scheduler, runner, core.tokenizer, core.eos_ids, core.recovery.make_space, runs_ahead=ahead)


def make_params(rng: random.Random) -> SamplingParams:
    greedy = rng.random() < 0.4
    return SamplingParams(
        temperature=0.0 if greedy else 0.8,
        seed=rng.randrange(100),
        max_tokens=rng.choice((1, 2, 3, 8, 20, 60)),
        ignore_eos=rng.random() < 0.6,
        stop=rng.sample([" a", "1", "so", "e", "\n", "="], 2) if rng.random() < 0.3 else None,
        stop_token_ids=[rng.randrange(5, 1000) for _ in range(30)] if rng.random() < 0.3 else None,
        min_tokens=1 if rng.random() < 0.2 else 0,
        repetition_penalty=1.3 if rng.random() < 0.15 else 1.0,
        bad_words=["the answer", "is"] if rng.random() < 0.15 else None,
        logit_bias={7: 2.0} if rng.random() < 0.1 else None,
        logprobs=2 if rng.random() < 0.2 else None,
        prompt_logprobs=1 if rng.random() < 0.1 else None,
        n=2 if rng.random() < 0.1 else 1,
    )


def make_load(started: Started, seed: int, number: int) -> list[Submission]:
    rng, load, floor = random.Random(seed), [], len(started.ladder.rungs) - 1
    head = [rng.randrange(5, 1000) for _ in range(200)]
    for i in range(number):
        ids = [rng.randrange(5, 1000) for _ in range(rng.choice((1, 5, 60, 127, 160)))]
        ids = head + ids if rng.random() < 0.2 else ids
        params = replace(make_params(rng), no_repeat_ngram_size=3 if i % 8 == 0 else 0)
        words = started.tokenizer.bad_word_ids(params.bad_words) if params.bad_words else []
        is_streamed = rng.random() < 0.5
        load.append(
            Submission(f"r{i}", None, ids, params, params.max_tokens, params.seed, words, is_streamed, floor=floor)
        )
    return load


def play(
    core: EngineCore,
    load: list[Submission],
    aborts: Mapping[int, str],
    errors: tuple[type[BaseException], ...] | type = (),
) -> list[RequestOutput]:
    """Submits two requests a step; after the steps named aborts whom ``aborts`` names; recovers from ``errors``."""
    to_come, step = list(load), 0
    while core.has_work or to_come:
        for submission in to_come[:2]:
            core.live[submission.request_id] = submission
            core.add(submission)
        del to_come[:2]
        try:
            core.step()
        except errors:
            core.recover()
        assert len(core._in_flight) <= core.runs_ahead
        step += 1
        if step in aborts:
            core.abort(aborts[step])
        core.space.tables.check_integrity()
        assert step < 5000
    assert not core.live and not core.registry.owners and not core.registry.rows and not core._in_flight
    if core.space.prefix is not None:
        core.space.prefix.clear()
    assert core.space.tables.arena.used_nbytes == 0
    return [submission.stream.get(0) for submission in load]


def seen(output: RequestOutput) -> list[Any]:
    """What must not differ, with log-probabilities as close as sums in another order are."""
    blocks = replace(output.kv, cached_tokens={})  # of what is found their number comes before
    found: list[Any] = [output.finished, output.error, output.num_cached_tokens, blocks]
    found += [len(output.metrics.token_times), [entry and list(entry) for entry in output.prompt_logprobs or ()]]
    for completion in output.outputs:
        total = completion.cumulative_logprob
        found += [completion.token_ids, completion.text, completion.delta, completion.finish_reason]
        found += [completion.stop_reason, [list(entry) for entry in completion.logprobs or ()]]
        found.append(None if total is None else pytest.approx(total, abs=1e-3))
    return found


@cache
def answered_plainly(seed: int) -> tuple[list[list[Any]], EngineCore]:
    """What must not differ from the answers of a core that waits for each token, and that core."""
    started = begin("fp32", "128MiB")
    plain = make_core(started, False)
    return [seen(output) for output in play(plain, make_load(started, seed, 30), {})], plain


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_mixed_requests_are_answered_alike(seed: int):
    expected, plain = answered_plainly(seed)
    started = begin("fp32", "128MiB")
    ahead = make_core(started, True)
    found = [seen(output) for output in play(ahead, make_load(started, seed, 30), {})]
    for mine, other in zip(found, expected, strict=True):
        # Requests that came while the first to compute a prefix ran a step ahead may find less of it.
        assert mine[:2] + mine[3:] == other[:2] + other[3:]
    assert ahead.runner.num_ahead > 100
    for name in ("num_finished", "num_failed", "generation_tokens", "num_requests"):
        assert getattr(ahead.counters, name) == getattr(plain.counters, name)


def test_aborts_and_preemptions_with_a_step_under_way(monkeypatch: pytest.MonkeyPatch):
    # Admission that looks at nothing, so that memory runs out and requests are preempted.
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    short = begin("fp32", "3MiB")
    aborts = {step: f"r{step % 30}" for step in range(3, 90, 4)}
    preempted = 0
    for seed in range(2):
        expected, _ = answered_plainly(seed)
        core = make_core(short, True)
        before = core.scheduler.num_preemptions
        outputs = play(core, make_load(short, seed, 30), aborts)
        preempted += core.scheduler.num_preemptions - before
        for output, other in zip(outputs, expected, strict=True):
            mine = seen(output)
            if any(c.finish_reason == "abort" for c in output.outputs):
                assert mine[6] == other[6][: len(mine[6])] and other[7].startswith(mine[7])
            else:
                assert mine[4:] == other[4:] and output.error is None
    assert preempted > 5


@pytest.mark.parametrize("place", ["launch", "wait"])
def test_a_step_that_breaks_off_with_another_under_way_fails_one_request(place: str):
    started = begin("fp32", "128MiB")
    expected, _ = answered_plainly(1)
    culprits = [i for i, output in enumerate(expected) if len(output[6]) > 8][3:8:2]
    core = make_core(started, True)
    core.runner.breaks = {f"r{i}": place for i in culprits} | {f"r{i}/0": place for i in culprits}
    outputs = play(core, make_load(started, 1, 30), {}, errors=RuntimeError)
    for i, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        if i in culprits:
            assert output.outputs[0].finish_reason == "error" and "injected" in output.error
            assert output.outputs[0].token_ids == other[6][:5]
        else:
            assert seen(output)[4:] == other[4:]
    assert core.counters.num_failed == len(culprits) == 3


def test_only_requests_whose_tokens_the_host_must_see_wait_for_them():
    started = begin("fp32", "64MiB", max_num_batched_tokens=600)
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    plain = Submission("plain", None, [5, 6, 7], SamplingParams(**params), 20, 0, [], False, floor=0)
    host = Submission(
        "host", None, [5, 6, 7], SamplingParams(presence_penalty=0.1, **params), 20, 0, [], False, floor=0
    )
    core = make_core(started, True)
    play(core, [plain], {})
    assert core.counters.num_steps == 20 and core.runner.num_ahead == 19
    core = make_core(started, True)
    play(core, [host], {})
    assert core.counters.num_steps == 20 and core.runner.num_ahead == 0


def test_a_request_that_stops_is_computed_one_step_too_far_and_no_more():
    started = begin("fp32", "64MiB", max_num_batched_tokens=600)
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 1, "max_tokens": 50, "ignore_eos": True}
    params = SamplingParams(**drawn)
    free = play(make_core(started, False), [Submission("a", None, [5, 6, 7], params, 50, 0, [], False, floor=0)], {})[0]
    ids = free.outputs[0].token_ids
    place = next(i for i in range(10, 50) if ids[i] not in ids[:i])
    stopping = SamplingParams(**drawn, stop_token_ids=[ids[place]])
    core = make_core(started, True)
    output = play(core, [Submission("b", None, [5, 6, 7], stopping, 50, 0, [], False, floor=0)], {})[0]
    assert output.outputs[0].token_ids == ids[: place + 1]
    assert (core.counters.num_steps, core.counters.generation_tokens) == (place + 2, place + 1)
