"""XQuant served by the engine: layers in pairs, eagerly, as the last rung under pressure, preempted and aborted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qkv_engine import Engine, KVConfig, RequestOutput, RungConfig, SamplingParams
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.presets import PRESETS

from ..small_demo import small_demo
from .test_precision_schedule import Recorder, Step, replay

DENSE = RungConfig("dense32", "dense32", "dense32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True, logprobs=0)

LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=0)


def eager(name: str, recent: int = 0) -> KVConfig:
    """The preset with 32 bits in place of 16, whose rounding would make much of every difference."""
    return replace(PRESETS[name], rungs=(DENSE, PRESETS[name].rungs[1]), recent=recent)


PRESSURE = KVConfig(
    name="pressure", rungs=(DENSE, uniform_rung(8), uniform_rung(4), PRESETS["xquant"].rungs[1]), sink=32
)


def prompts(number: int, shortest: int = 280, longest: int = 450) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, 1000) for _ in range(rng.randint(shortest, longest))] for _ in range(number)]


def runs(schedule: list[Step]) -> list[list[Step]]:
    """The steps of a request from its start, and from each preemption, which computes it again."""
    starts = [i for i, step in enumerate(schedule) if step.start == 0]
    return [schedule[first:end] for first, end in zip(starts, [*starts[1:], len(schedule)], strict=True)]


def answer_alone(engine: Engine, prompt: list[int], output: RequestOutput, schedule: list[Step]) -> list[int]:
    """The tokens of the request computed again with nobody beside it, its blocks on the rungs they stood on."""
    runner, expected = engine._started.core.runner, output.outputs[0].token_ids
    found: list[int] = []
    for steps in runs(schedule):
        known = prompt + expected[: len(found)]
        tokens = engine._loop.call(lambda p=known, s=steps: replay(runner, p, LONG, s))
        found += [token.token_id for token in tokens]
    return found


@pytest.mark.parametrize(
    ("kv", "kv_memory"),
    [
        (eager("xquant-1.28-g32"), "64MiB"),
        (eager("xquant-1.16-g32-sink"), "64MiB"),
        (PRESSURE, "2560KiB"),
    ],
    ids=["1.28", "1.16", "pressure"],
)
def test_a_request_answers_alone_as_in_the_crowd(kv: KVConfig, kv_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in chunks, and their blocks step down together."""
    with Engine(
        small_demo(), kv=kv, kv_memory=kv_memory, prefix_caching=False, max_num_batched_tokens=200, device="cpu"
    ) as engine:
        recorder, crowd = Recorder(engine, monkeypatch), prompts(3)
        outputs = engine.generate(crowd, GREEDY)
        narrow = kv.rungs[-1].name
        demotions = engine.stats().demotions
        assert demotions[f"{'dense32' if kv.eager else 'int4'}->{narrow}"] > 4
        assert all(output.error is None for output in outputs)
        if kv.eager:
            assert all(output.kv.blocks[narrow] >= 2 and output.kv.lowest_bits == 1 for output in outputs)
        schedules = [recorder.schedules[tuple(prompt)] for prompt in crowd]
        monkeypatch.undo()
        for prompt, output, schedule in zip(crowd, outputs, schedules, strict=True):
            assert answer_alone(engine, prompt, output, schedule) == output.outputs[0].token_ids


def test_preempted_and_aborted_requests_leave_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for some of the crowd, and admission that looks at nothing; the second request is aborted."""
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    with Engine(
        small_demo(), kv=eager("xquant-g32", 128), kv_memory="3MiB", prefix_caching=False, device="cpu"
    ) as engine:
        recorder, crowd = Recorder(engine, monkeypatch), prompts(4, 200, 250)
        streams = [engine.stream(prompt, LONG) for prompt in crowd]
        next(iter(streams[1]))
        engine.abort(streams[1].request_id)
        outputs = [list(stream)[-1] for stream in streams]
        stats = engine.stats()
        assert stats.num_preemptions > 0 and stats.kv_bytes_used == 0
        assert stats.demotions["dense32->xquant-g32"] > 0
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "abort", "length", "length"]
        schedules = [recorder.schedules[tuple(prompt)] for prompt in crowd]
        assert any(len(runs(schedule)) > 1 for schedule in schedules)
        monkeypatch.undo()
        for prompt, output, schedule in zip(crowd, outputs, schedules, strict=True):
            assert output.error is None
            found = answer_alone(engine, prompt, output, schedule)
            assert found[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
