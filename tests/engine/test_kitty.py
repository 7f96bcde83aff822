"""Kitty sides served by the engine: eagerly, and as the last rung under pressure."""

from __future__ import annotations

import random

import pytest

from qkv_engine import Engine, KVConfig, RungConfig, SamplingParams
from qkv_engine.device.runner import Runner
from qkv_engine.device.sampler import SampledToken
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.request import Request
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..small_demo import small_demo
from .test_precision_schedule import Recorder, replay

DENSE = RungConfig("dense32", "dense32", "dense32")
KITTY = RungConfig("kitty", "kitty-25", "int2-token-128")
EAGER = KVConfig(name="eager", rungs=(DENSE, KITTY), sink=32, eager=True)
PRESSURE = KVConfig(name="pressure", rungs=(DENSE, uniform_rung(8), uniform_rung(4), KITTY), sink=32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1000) for _ in range(rng.randint(300, 500))] for _ in range(number)]


@pytest.mark.parametrize(
    ("kv", "kv_memory"),
    [pytest.param(EAGER, "64MiB", marks=pytest.mark.slow), (PRESSURE, "4352KiB")],
    ids=["eager", "pressure"],
)
def test_a_request_answers_alone_as_in_the_crowd(kv: KVConfig, kv_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks stand on the same rungs in the same steps."""
    with Engine(
        small_demo(), kv=kv, kv_memory=kv_memory, prefix_caching=False, max_num_batched_tokens=200, device="cpu"
    ) as engine:
        recorder = Recorder(engine, monkeypatch)
        crowd = prompts(5)
        outputs = engine.generate(crowd, GREEDY)
        step = "dense32->kitty" if kv.eager else "int4->kitty"
        assert engine.stats().demotions[step] > 5 and all(output.error is None for output in outputs)
        assert all(output.kv.blocks.get("kitty", 0) for output in outputs) or not kv.eager
        schedules = [recorder.schedules[tuple(prompt)] for prompt in crowd]
        monkeypatch.undo()
        runner = engine._started.core.runner
        for prompt, output, schedule in zip(crowd, outputs, schedules, strict=True):
            found = engine._loop.call(lambda p=prompt, s=schedule: replay(runner, p, GREEDY, s))
            assert [token.token_id for token in found] == output.outputs[0].token_ids


def test_every_path_to_the_floor_gives_the_same_answer() -> None:
    """The blocks of a prompt step down between the prompt and its answer; even log-probabilities are equal."""
    [prompt] = prompts(1)
    with Engine(small_demo(), kv=PRESSURE, kv_memory="64MiB", device="cpu") as engine:
        runner = engine._started.core.runner
        found = [engine._loop.call(lambda p=path: answer(runner, prompt, p)) for path in ((3,), (1, 2, 3), (2, 3), ())]
    tokens, others = found[:3], found[3]
    numbers = [[(token.token_id, token.logprobs.logprob) for token in path] for path in tokens]
    assert numbers[0] == numbers[1] == numbers[2]
    assert numbers[0] != [(token.token_id, token.logprobs.logprob) for token in others]


def answer(runner: Runner, prompt: list[int], path: tuple[int, ...]) -> list[SampledToken]:
    """Ten tokens after a prompt whose full blocks take the rungs of ``path`` one after the other."""
    cache = runner.cache
    cache.reset()
    last = len(cache.ladder.rungs) - 1
    cache.tables.open("a", last)
    request = Request("a", prompt, GREEDY, 40, floor=last, seed=0)
    rows = {request: SampleRow(GREEDY, 0, request.token_ids, len(prompt))}
    found: list[SampledToken] = []
    start, number = 0, len(prompt)
    while len(found) < 10:
        assert cache.tables.reserve("a", start + number) and not cache.apply_moves(runner.backend)
        result = runner.run(ScheduledBatch([ScheduledRequest.of(request, start, number)]), rows)
        found.append(result.special[0])
        request.token_ids.append(result.token_ids[0])
        request.num_tokens += 1
        start, number = start + number, 1
        for rung in path if len(found) == 1 else ():
            full = [block for block in cache.tables.main["a"].blocks if block.rung < rung][: (len(prompt) - 32) // 128]
            assert cache.tables.demote([(block, rung) for block in full]) == 2 and not cache.apply_moves(runner.backend)
    return found
