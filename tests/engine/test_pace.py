"""``max_itl_ms`` end to end: the times that the core notes, and tokens that do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from qkv_engine import Engine, RequestOutput, SamplingParams
from qkv_engine.request import Request
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.scheduler import ScheduledBatch
from qkv_engine.serving import core as core_module
from qkv_engine.serving import launched as launched_module
from qkv_engine.serving.core import EngineCore

from ..small_demo import small_demo
from .test_run_ahead import LateRunner, begin, make_load, play

IDLE_SECONDS = 1000.0


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class TimedRunner(LateRunner):
    """A device that runs steps one after another, each for 4 seconds and 1/64 a token."""

    def __init__(self, runner: Any, clock: Clock):
        super().__init__(runner)
        self.clock, self.free_at = clock, 0.0
        self.expected: list[tuple[float, int]] = []  # of steps with single tokens

    def launch(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]) -> Any:
        found = super().launch(batch, rows)
        seconds = 4 + batch.num_tokens / 64
        if any(item.num_tokens == 1 for item in batch.items):
            self.expected.append((seconds, sum(i.num_tokens for i in batch.items if i.num_tokens > 1)))
        end = self.free_at = max(self.free_at, self.clock.now) + seconds

        def wait() -> Any:
            self.clock.now = max(self.clock.now, end)
            return found.wait()

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_core_notes_what_each_step_took_and_no_time_without_work(ahead: bool, monkeypatch: pytest.MonkeyPatch):
    clock, noted = Clock(), list[tuple[float, int]]()
    for module in (core_module, launched_module):
        monkeypatch.setattr(module, "time", clock)
    started = begin("fp32", "16MiB", max_itl_ms=5000)
    core, pace = started.core, started.core.scheduler.pace
    assert pace is not None and pace.max_itl == 5.0
    monkeypatch.setattr(pace, "note", lambda seconds, tokens: noted.append((seconds, tokens)))
    runner: Any = TimedRunner(core.runner, clock)
    core = EngineCore(core.scheduler, runner, core.tokenizer, core.eos_ids, core.recovery.make_space, runs_ahead=ahead)
    for seed in range(2):
        clock.now += IDLE_SECONDS
        play(core, make_load(started, seed, 8), {})
    assert noted == runner.expected and sum(tokens > 0 for _, tokens in noted) >= 5


def answers(max_itl_ms: float | None) -> tuple[list[RequestOutput], int]:
    """Answers to prompts of which the first ones are short, and the number of steps with several tokens of them."""
    prompts = [[5 + (7 * i * k + k) % 900 for k in range(n)] for i, n in enumerate((6, 9, 700, 400, 130), 1)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with Engine(
        small_demo(), kv="fp32", kv_memory="16MiB", dtype="float32", max_num_batched_tokens=512, max_itl_ms=max_itl_ms
    ) as engine:
        found = engine.generate(prompts, params)
        return found, engine.stats().num_steps


def test_tokens_are_the_same_with_and_without_a_limit():
    free, num_free = answers(None)
    limited, num_limited = answers(1e-6)
    assert [output.token_ids for output in limited] == [output.token_ids for output in free]
    # 1,245 prompt tokens: 512 in the first step, beside no decoder, and then 64 a step or 512.
    assert num_limited - num_free >= 7


def test_a_limit_that_no_step_comes_near_changes_no_step():
    assert answers(60_000)[1] <= answers(None)[1] + 2  # the first chunk beside decoders has 256 tokens
