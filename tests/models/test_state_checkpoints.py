"""Checkpoints of hybrids: requests that begin on one give the tokens that they give alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from qkv_engine import ConfigError, Engine, RequestOutput, SamplingParams
from qkv_engine.device.cpu.states import CpuStates

from ..engine.test_command import Twin
from ..engine.test_run_ahead import begin, make_core, play
from .test_engine_parity import assert_greedy
from .test_families import HYBRID
from .test_hybrids import CASES, SPEC, submissions, tokens

LENGTHS = (1, 33, 129, 300)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)


@pytest.fixture
def folder(saved: Callable[..., transformers.PreTrainedModel], tmp_path: Path) -> Path:
    saved("Qwen3_5", HYBRID)
    return tmp_path


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, kv="fp32", kv_memory="8MiB", device="cpu", max_num_batched_tokens=97) as engine:
        yield engine


def prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 97) for _ in range(length)] for length in lengths]


def following(outputs: list[RequestOutput], more: int = 37) -> list[list[int]]:
    """Second turns: what was said, and ``more`` tokens."""
    return [[*output.prompt_token_ids, *output.token_ids, *([7] * more)] for output in outputs]


def found(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_greedy_tokens_equal_transformers_behind_checkpoints(
    family: str, changes: dict[str, Any], saved: Callable[..., transformers.PreTrainedModel], tmp_path: Path
) -> None:
    reference, work = saved(family, changes), prompts()
    # 23 tokens a step: chunks begin and end at odd places, and at the borders where checkpoints stand
    options: dict[str, Any] = {"kv": "fp32", "kv_memory": "16MiB", "device": "cpu", "max_num_batched_tokens": 23}
    with Engine(tmp_path, **options) as engine:
        first = engine.generate(work, GREEDY)
        second = engine.generate(following(first), GREEDY)
        third = engine.generate(following(second, 5), GREEDY)
        again = engine.generate(work, GREEDY)
        stats = engine.stats()
    assert found(first) == [0, 0, 0, 0] and found(second) == [0, 0, 128, 256]
    assert found(third) == [0, 0, 128, 256] and found(again) == [0, 0, 128, 256]
    assert [output.kv.cached_tokens for output in second[2:]] == [{"dense32": 128}, {"dense32": 256}]
    assert stats.num_checkpoint_hits == 6 and stats.kv_bytes_checkpoints <= stats.kv_bytes_cached
    for output in (*first, *second, *third, *again):
        assert_greedy(reference, output, 20)


def test_a_second_turn_computes_its_new_tokens_and_the_tail_of_a_block(engine: Engine) -> None:
    work = prompts(1, (300, 200))
    first = engine.generate(work, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    known, before = [len(output.prompt_token_ids) + 89 for output in first], engine.stats().prompt_tokens
    second = engine.generate(following(first), GREEDY)
    computed = engine.stats().prompt_tokens - before
    assert found(second) == [384, 256] == [number // 128 * 128 for number in known]
    assert computed == sum(38 + number % 128 for number in known)


def test_states_of_others_are_not_shared_by_two_who_begin_on_one_checkpoint(engine: Engine) -> None:
    """Both go on from it at once, with other tokens each."""
    (work,) = prompts(2, (300,))
    engine.generate([work], GREEDY)
    both = [work[:280] + [11] * 20, work[:280] + [13] * 30]
    together = engine.generate(both, GREEDY)
    assert found(together) == [256, 256]
    engine._started.core.space.prefix.clear()
    assert tokens(engine.generate(both[:1], GREEDY)) == tokens(together[:1])
    assert tokens(engine.generate(both[1:], GREEDY)) == tokens(together[1:])


def test_salts_share_no_states(engine: Engine) -> None:
    work = prompts(3, (300,))
    engine.generate(work, SamplingParams(max_tokens=1, cache_salt="a"))
    assert found(engine.generate(work, SamplingParams(max_tokens=1, cache_salt="b"))) == [0]
    assert found(engine.generate(work, SamplingParams(max_tokens=1, cache_salt="a"))) == [256]


def test_prompt_logprobs_are_computed_from_the_first_token(engine: Engine) -> None:
    work = prompts(4, (300,))
    engine.generate(work, GREEDY)
    (output,) = engine.generate(work, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert output.num_cached_tokens == 0 and len(output.prompt_logprobs or ()) == 300


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_turns_under_pressure_give_the_tokens_of_turns_with_room(folder: Path, ahead: bool) -> None:
    """Memory for few: checkpoints and blocks are given up, requests give way, and go on from what is left."""
    options: dict[str, Any] = {"model": str(folder), "max_num_seqs": 4, "max_model_len": 512}
    first = prompts(5, tuple(100 + 37 * i % 200 for i in range(16)))
    core = make_core(begin("fp32", "16MiB", prefix_caching=False, **options), False)
    second = following(play(core, submissions(first, {}), {}))
    work = [ids for i in range(0, 16, 4) for ids in first[i : i + 4] + second[i : i + 4]]
    expected = tokens(play(core, submissions(work, {}), {}))
    core = make_core(begin("fp32", "960KiB", **options), ahead)
    evict, gone = core.space.prefix.evict, []

    def watched() -> bool:
        before = len(core.space.prefix.checkpoints)
        done = evict()
        gone.append(before - len(core.space.prefix.checkpoints))
        return done

    core.space.prefix.evict = watched  # type: ignore[method-assign]
    assert tokens(play(core, submissions(work, {}), {})) == expected
    assert core.space.prefix.checkpoints.num_hits > 4 and sum(gone) > 4


def test_a_preempted_request_goes_on_from_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = begin("fp32", "2MiB", model=str(folder), max_model_len=512)
    work, core = prompts(6, (150, 160)), make_core(started, False)
    expected = tokens(play(core, submissions(work, {}), {}))
    core, preempted, cached = make_core(started, False), [], []
    schedule = core.scheduler.schedule

    def watched() -> Any:
        running = list(core.scheduler.running)
        if running and running[-1].num_output_tokens == 9 and not preempted:
            preempted.append(running[-1])
            core.scheduler._preempt(running[-1])
        batch = schedule()
        cached.extend(item.start for item in batch.items if item.request in preempted and item.num_tokens > 1)
        return batch

    monkeypatch.setattr(core.scheduler, "schedule", watched)
    assert tokens(play(core, submissions(work, {}), {})) == expected
    assert preempted and cached[-1] == 128


def test_blocks_of_a_hit_may_be_narrow_and_its_states_are_not(folder: Path) -> None:
    with Engine(folder, kv="auto", kv_memory="320KiB", device="cpu", max_num_batched_tokens=48) as engine:
        for seed in range(8):
            first = engine.generate(prompts(seed, (300,)), GREEDY)
            second = engine.generate(following(first), GREEDY)
            assert not second[0].error and second[0].num_cached_tokens
        stats = engine.stats()
        assert stats.num_idle_demotions and stats.num_checkpoint_hits == 8
        engine._started.core.space.tables.check_integrity()


def test_steps_that_break_off_behind_a_checkpoint_start_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step went on from restored states and may have rewritten them: nothing of the cache is trusted."""
    work, compute, calls = prompts(7, (300,)), CpuStates.delta_net, 0
    first = engine.generate(work, GREEDY)
    expected = tokens(engine.generate(following(first), GREEDY))

    def broken(self: CpuStates, layer: int, *rest: Any) -> Tensor:
        nonlocal calls
        out, calls = compute(self, layer, *rest), calls + 1
        if calls == 2:
            raise KeyError("injected")
        return out

    with monkeypatch.context() as patched:
        patched.setattr(CpuStates, "delta_net", broken)
        outputs = engine.generate(following(first), GREEDY)
    assert tokens(outputs) == expected and calls > 2
    assert engine.stats().num_failed == 0


def test_states_that_are_not_finite_are_not_offered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    work, compute = prompts(8, (300,)), CpuStates.delta_net

    def spoil(self: CpuStates, layer: int, *rest: Any) -> Tensor:
        out = compute(self, layer, *rest)
        for item in self._items:
            _, views = self._planner.state(layer, item)
            for part in views.parts():
                part.fill_(torch.nan)
        return out * torch.nan

    with monkeypatch.context() as patched:
        patched.setattr(CpuStates, "delta_net", spoil)
        (bad,) = engine.generate(work, GREEDY)
    assert bad.finish_reason == "error" and not len(engine._started.core.space.prefix.checkpoints)
    assert found(engine.generate(work, GREEDY)) == [0] and found(engine.generate(work, GREEDY)) == [256]


def test_commands_carry_copies_of_states(folder: Path) -> None:
    """Plain data is all that a back end learns: its words are those of the books after each command."""
    started = begin("auto", "512KiB", model=str(folder), max_model_len=512)
    core, runner = started.core, started.core.runner
    twin = Twin(runner)
    runner.backend = twin  # type: ignore[assignment]
    work, floor = prompts(9), started.ladder.last
    work += following(play(core, submissions(work, {}, floor), {}))
    outputs = play(core, submissions(work, {}, floor), {})
    assert not any(output.error for output in outputs) and core.space.prefix.checkpoints.num_hits


@pytest.mark.slow
def test_two_ranks_restore_equal_addresses(saved: Callable[..., Any], tmp_path: Path) -> None:
    saved("Qwen3_5", HYBRID | {"intermediate_size": 88})
    turns = []
    for size in (1, 2):
        options: dict[str, Any] = {"kv": "fp32", "kv_memory": f"{4096 // size}KiB", "num_threads": 1}
        with Engine(tmp_path, tensor_parallel=size, device="cpu", max_num_batched_tokens=48, **options) as engine:
            first = engine.generate(prompts(10), GREEDY)
            second = engine.generate(following(first), GREEDY)
        assert found(second) == [0, 0, 128, 256]
        turns.append((tokens(first), tokens(second)))
    assert turns[0] == turns[1]


def test_checkpoints_have_the_bytes_of_the_states(engine: Engine) -> None:
    nbytes = 3 * SPEC.nbytes(torch.float32)
    engine.generate(prompts(11, (300,)), GREEDY)
    stats = engine.stats()
    assert stats.kv_bytes_checkpoints == 2 * nbytes and stats.num_checkpoints == 2
    assert engine._started.core.space.prefix.checkpoints.every == 1


def test_host_memory_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="states"):
        Engine(folder, kv="fp32", kv_memory="4MiB", device="cpu", host_memory="4MiB")
