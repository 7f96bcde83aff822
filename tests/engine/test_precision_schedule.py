"""What a request answers depends on its own tokens and on the precision its blocks stood on, and on nothing else.

So a request from a crowd under pressure is computed again alone, with its recorded precision schedule: in which step
how many tokens were computed, and on which rungs its blocks stood. Tokens have to be the same ones. Log-probabilities
are compared closely and not bit for bit, because the CPU's attention sums in another order when its neighbours' lengths
differ, and now and then that little turns a code on the edge of rounding into its neighbour. Dense blocks are in 32
bits here: rounding them to 16 would make much of every difference.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from qkv_engine import Engine, KVConfig, SamplingParams
from qkv_engine.config import RungConfig
from qkv_engine.device.cache import KVCache
from qkv_engine.device.runner import Runner
from qkv_engine.device.sampler import SampledToken
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.request import Request
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..small_demo import small_demo

DENSE = RungConfig("dense32", "dense32", "dense32")
PRESSURE = KVConfig(name="pressure", rungs=(DENSE, uniform_rung(8), uniform_rung(4)), sink=32)
EAGER = KVConfig(name="eager", rungs=(DENSE, uniform_rung(4)), sink=32, eager=True)
KV_MEMORY = 11 * 2**20  # for about a third of the crowd in 32 bits


class Step(NamedTuple):
    """One step of one request: its tokens, and the rungs of its blocks while they were computed."""

    start: int
    num_tokens: int
    rungs: list[int]


class Recorder:
    """Notes the precision schedule of every request while an engine runs."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.schedules: dict[tuple[int, ...], list[Step]] = {}  # by prompt
        runner = engine._started.core.runner
        launch, cache = runner.launch, runner.cache

        def recorded(batch: ScheduledBatch, rows: object) -> object:
            for item in batch.items:
                blocks = cache.tables.main[item.request.request_id].blocks
                step = Step(item.start, item.num_tokens, [block.rung for block in blocks])
                self.schedules.setdefault(tuple(item.request.prompt_token_ids), []).append(step)
            return launch(batch, rows)

        monkeypatch.setattr(runner, "launch", recorded)


def replay(runner: Runner, prompt: list[int], params: SamplingParams, schedule: list[Step]) -> list[SampledToken]:
    """Computes a request alone, step by step as it was scheduled, each block on the rung it stood on."""
    cache: KVCache = runner.cache
    cache.reset()
    tables, name = cache.tables, "alone"
    last = len(cache.ladder.rungs) - 1
    request = Request(name, prompt, params, params.max_tokens or 1, floor=last, seed=params.seed or 0)
    rows = {request: SampleRow(params, request.seed, request.token_ids, len(prompt))}
    tables.open(name, last, num_prompt_tokens=len(prompt))
    found = []
    for start, num_tokens, rungs in schedule:
        assert tables.reserve(name, start + num_tokens)
        blocks = tables.main[name].blocks
        tables.coldest(name, start)  # patterns are mined from what is computed
        tables.demote([(block, rung) for block, rung in zip(blocks, rungs, strict=True) if block.rung < rung])
        assert [block.rung for block in blocks] == rungs and not cache.apply_moves(runner.backend)
        result = runner.run(ScheduledBatch([ScheduledRequest.of(request, start, num_tokens)]), rows)
        [token_id] = result.token_ids
        if token_id is not None:
            found.append(result.special[0])  # with its log-probability
            request.token_ids.append(token_id)
            request.num_tokens += 1
    return found


def crowd(number: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 1000) for _ in range(rng.randint(200, 600))] for _ in range(number)]
    shared = {"max_tokens": 50, "ignore_eos": True, "logprobs": 0}
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.7, seed=i, kv_pinned=i % 4 == 3, **shared) for i in range(number)
    ]
    return prompts, params


@pytest.mark.parametrize("kv", [PRESSURE, pytest.param(EAGER, marks=pytest.mark.slow)], ids=lambda kv: kv.name)
def test_a_recorded_precision_schedule_gives_the_same_answer_alone(kv: KVConfig, monkeypatch: pytest.MonkeyPatch):
    prompts, params = crowd(8)
    with Engine(small_demo(), kv=kv, kv_memory=KV_MEMORY, prefix_caching=False, max_num_batched_tokens=160) as engine:
        recorder = Recorder(engine, monkeypatch)
        outputs = engine.generate(prompts, params)
        schedules = [recorder.schedules[tuple(prompt)] for prompt in prompts]
        monkeypatch.undo()
        runner = engine._started.core.runner
        assert engine.stats().num_preemptions == 0
        narrowed = 0
        for prompt, param, output, schedule in zip(prompts, params, outputs, schedules, strict=True):
            completion = output.outputs[0]
            tokens = engine._loop.call(lambda p=prompt, s=param, h=schedule: replay(runner, p, s, h))
            assert [token.token_id for token in tokens] == completion.token_ids
            expected = [entry[i].logprob for i, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
            gaps = [abs(token.logprobs.logprob - other) for token, other in zip(tokens, expected, strict=True)]
            # One block on another rung moves a third of them by more than 1e-4.
            assert max(gaps) < 0.02 and sum(gap > 1e-4 for gap in gaps) < 0.15 * len(gaps)
            narrowed += any(len(set(step.rungs)) > 1 for step in schedule)
            if param.kv_pinned:
                assert all(set(step.rungs) <= {0} for step in schedule)
        assert narrowed >= 4, "hardly any request stepped down"


def test_a_pinned_request_answers_the_same_in_any_crowd():
    prompts, params = crowd(8)
    with Engine(small_demo(), kv=PRESSURE, kv_memory=KV_MEMORY, prefix_caching=False) as engine:
        together = engine.generate(prompts, params)
        assert engine.stats().num_demotions > 10
        for prompt, param, output in zip(prompts, params, together, strict=True):
            if param.kv_pinned:
                alone = engine.generate([prompt], param)[0]
                assert alone.outputs[0].token_ids == output.outputs[0].token_ids
