"""Pattern sides served by the engine: eagerly, under pressure, and after interrupts."""

from __future__ import annotations

import json
import random

import pytest

from qkv_engine import Engine, KVConfig, SamplingParams
from qkv_engine.cli.main import main
from qkv_engine.config import RungConfig
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.serving.submission import Submission

from ..small_demo import small_demo
from .test_precision_schedule import Recorder, replay

DENSE = RungConfig("dense32", "dense32", "dense32")
EAGER = KVConfig(name="eager", rungs=(DENSE, pattern_rung(2)), recent=128, eager=True)
EAGER_SINK = KVConfig(name="eager-sink", rungs=(DENSE, pattern_rung(2)), sink=32, recent=128, eager=True)
PRESSURE = KVConfig(name="pressure", rungs=(DENSE, pattern_rung(4, 32), pattern_rung(2, 32)), sink=32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LENGTHS = (300, 1, 31, 32, 127, 128, 129, 450)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1000) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("kv", "kv_memory"),
    [*(pytest.param(kv, "64MiB", marks=pytest.mark.slow) for kv in (EAGER, EAGER_SINK)), (PRESSURE, "5376KiB")],
    ids=["eager", "sink", "pressure"],
)
def test_a_request_answers_alone_as_in_the_crowd(kv: KVConfig, kv_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks stand on the same rungs in the same steps, and its patterns are mined in the same one."""
    lengths = LENGTHS if kv.eager else (300, 350, 400, 450, 380)
    with Engine(small_demo(), kv=kv, kv_memory=kv_memory, max_num_batched_tokens=200, device="cpu") as engine:
        recorder = Recorder(engine, monkeypatch)
        crowd = prompts(lengths)
        outputs = engine.generate(crowd, GREEDY)
        stats, last = engine.stats(), kv.rungs[-1].name
        assert stats.demotions[f"{kv.rungs[-2].name}->{last}"] > 2 and stats.kv_bytes_used == 0
        assert all(output.error is None and output.num_cached_tokens == 0 for output in outputs)
        assert any(output.kv.blocks.get(last, 0) for output in outputs)
        schedules = [recorder.schedules[tuple(prompt)] for prompt in crowd]
        monkeypatch.undo()
        runner = engine._started.core.runner
        for prompt, output, schedule in zip(crowd, outputs, schedules, strict=True):
            found = engine._loop.call(lambda p=prompt, s=schedule: replay(runner, p, GREEDY, s))
            assert [token.token_id for token in found] == output.outputs[0].token_ids


def test_chunks_of_other_sizes_give_the_same_answer() -> None:
    found = []
    for budget in (64, 200, 2048):
        with Engine(small_demo(), kv=EAGER, kv_memory="64MiB", max_num_batched_tokens=budget, device="cpu") as engine:
            found.append([output.token_ids for output in engine.generate(prompts(LENGTHS), GREEDY)])
    assert found[0] == found[1] == found[2]


def test_windows_behind_a_prompt_add_patterns_in_chunks_of_any_size() -> None:
    """The reply is read as decoding would; its patterns change what is predicted, and chunks do not."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, num_prefill_tokens=100)
    (ids,) = prompts((700,))

    def read(kv: KVConfig, budget: int) -> list[float]:
        with Engine(small_demo(), kv=kv, kv_memory="64MiB", max_num_batched_tokens=budget, device="cpu") as engine:
            (output,) = engine.generate([ids], params)
        assert output.prompt_logprobs is not None
        entries = zip(ids, output.prompt_logprobs, strict=True)
        return [entry[token].logprob for token, entry in entries if entry is not None]

    later = KVConfig(name="later", rungs=(DENSE, pattern_rung(2, 16, 3)), recent=128, eager=True)
    plain = KVConfig(name="plain", rungs=(DENSE, pattern_rung(2, 16)), recent=128, eager=True)
    found = read(later, 2048)
    assert read(later, 64) == pytest.approx(
        found, abs=0.05
    )  # keys differ in the last bits, and so a code here and there
    assert read(plain, 2048) != pytest.approx(found, abs=0.2)


def test_recovery_and_abort_leave_no_bank_behind() -> None:
    """Everything is recomputed after an interrupt, patterns too; who is aborted gives its bank back."""
    with Engine(small_demo(), kv=EAGER, kv_memory="64MiB", device="cpu") as engine:
        core = engine._started.core
        asked = prompts((300, 400, 280), seed=1)  # no token of these is a near tie: what is recomputed rounds otherwise
        expected = [output.token_ids for output in engine.generate(asked[:2], LONG)]

        def play() -> list[list[int]]:
            work = [Submission(f"r{i}", None, ids, LONG, 40, 0, [], True, floor=1) for i, ids in enumerate(asked)]
            for submission in work:
                core.live[submission.request_id] = submission
                core.add(submission)
            banks = []
            while core.has_work:
                core.step()
                if core.counters.num_steps % 12 == 0 and len(banks) < 2:
                    banks.append(core.space.tables.main["r0"].bank)
                    assert banks[-1] is not None and banks[-1].is_mined
                    core.recover()
                if len(banks) == 2:
                    core.abort("r2")
            assert banks[0] is not banks[1] and core.space.tables.arena.used_nbytes == 0
            return [submission.stream.get(0).token_ids for submission in work[:2]]

        core.counters.num_steps = 0
        assert engine._loop.call(play) == expected


def test_env_counts_the_bank(capsys: pytest.CaptureFixture[str]) -> None:
    capacities = []
    for kv in ("kivi-2", "patternkv"):
        assert main(["env", "--kv", kv, "--kv-memory", "66400000", "--format", "json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        capacities.append([rung["capacity_tokens"] for rung in facts["kv"]["rungs"]])
    assert 0 < capacities[1][0] < capacities[0][0] and capacities[0][0] < capacities[1][1] < capacities[0][1]
