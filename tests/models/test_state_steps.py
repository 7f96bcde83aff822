"""Hybrids whose live states step down when memory runs short: tokens, floors, ranks, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from qkv_engine import ConfigError, Engine, EngineStats, RequestOutput, SamplingParams
from qkv_engine.bench.sizing import largest_batch, make_ladder
from qkv_engine.kernels.delta_net import narrow_states
from qkv_engine.loading import with_weights
from qkv_engine.models.loader import weights_nbytes
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import resolve_kv

from .test_families import HYBRID
from .test_state_formats import prompts

LARGE = {"intermediate_size": 88, "linear_key_head_dim": 32, "linear_value_head_dim": 32}  # states as large as blocks
STEP = "float32->int16"
TIGHT = {"kv": "auto", "kv_memory": "1MiB", "num_threads": 1, "device": "cpu", "prefix_caching": False}
KINDS = ({"kv_pinned": True}, {}, {"kv_floor": "int8"}, {})  # of requests, by turns


@pytest.fixture
def folder(saved: Callable[..., transformers.PreTrainedModel], tmp_path: Path) -> Path:
    saved("Qwen3_5", HYBRID | LARGE)
    return tmp_path


def params(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, **KINDS[index % len(KINDS)])


def run(folder: Path, work: list[list[int]], **options: Any) -> tuple[list[RequestOutput], EngineStats]:
    with Engine(folder, **(TIGHT | options)) as engine:
        outputs = engine.generate(work, [params(i) for i in range(len(work))])
        engine._started.core.space.tables.check_integrity()
        return outputs, engine.stats()


def test_requests_that_stay_wide_have_the_tokens_of_ample_memory(folder: Path) -> None:
    work = prompts(24, least=60)
    outputs, stats = run(folder, work)
    ample, none = run(folder, work, kv_memory="16MiB")
    assert stats.demotions[STEP] and STEP not in none.demotions
    assert [len(output.token_ids) for output in outputs] == [30] * 24
    for index in range(0, 24, len(KINDS)):
        assert outputs[index].token_ids == ample[index].token_ids


def test_two_ranks_step_down_as_one_does(folder: Path) -> None:
    """Each rank rewrites its heads of a state; pinned requests show that no other byte is touched."""
    work = prompts(24, least=60)
    ample, _ = run(folder, work, kv_memory="16MiB")
    outputs, stats = run(folder, work, kv_memory="512KiB", tensor_parallel=2)
    assert stats.demotions[STEP] and [len(output.token_ids) for output in outputs] == [30] * 24
    for index in range(0, 24, len(KINDS)):
        assert outputs[index].token_ids == ample[index].token_ids


def test_a_state_that_is_not_finite_ends_its_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def spoilt(memory: Tensor, src: Tensor, *rest: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            start = int(src[0])
            memory[start : start + 4].view(torch.float32).fill_(torch.nan)
        narrow_states(memory, src, *rest)

    monkeypatch.setattr("qkv_engine.device.mover.narrow_states", spoilt)
    outputs, _ = run(folder, prompts(24, least=60))
    (bad,) = (output for output in outputs if output.error)
    assert "not finite" in str(bad.error) and calls > 1
    assert [len(output.token_ids) for output in outputs if output is not bad] == [30] * 23


def test_requests_tell_how_their_states_stood(folder: Path) -> None:
    outputs, _ = run(folder, prompts(24, least=60))
    assert all(output.kv.states == {"float32": 3} for output in outputs[:: len(KINDS)])
    assert any(output.kv.states == {"int16": 3} for output in outputs)
    assert {sum(output.kv.states.values()) for output in outputs} == {3}


@pytest.mark.parametrize(
    ("kv", "value", "why"),
    [
        ("int4", "float32,int16", "step down behind blocks"),
        ("bf16", "int16,int8", "step down behind blocks"),
        ("auto", "int16,float32", "unknown"),
        ("auto", "float32,float32", "unknown"),
        ("auto", "", "unknown"),
    ],
)
def test_ladders_that_cannot_be_are_refused(kv: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)state_dtype.*{why}"):
        resolve_kv(kv, value)


def test_a_floor_of_some_bits_keeps_states_at_as_many() -> None:
    floors = {
        ("auto", None): (0, 1, 1),
        ("auto", "float32,int16,int8"): (0, 2, 2),
        ("auto", "int16,int8"): (0, 1, 1),
        ("auto-2", "float32,int16,int8"): (0, 2, 2, 2),
        ("auto", "int16"): (),
        ("int4", None): (),
    }
    model = config_from_hf(SHAPES["qwen3.5-27b"])
    for (kv, state_dtype), expected in floors.items():
        ladder = make_ladder(resolve_kv(kv, state_dtype), model, torch.bfloat16, max_model_len=4096)
        assert ladder.main.state_floors == expected


def test_a_27b_model_in_24_gib_holds_three_times_the_requests() -> None:
    """Weights of 4 bits and requests of 32,768 tokens: both step down, beside neither."""
    model = with_weights(config_from_hf(SHAPES["qwen3.5-27b"]), "int4")
    left = 24 * 2**30 - weights_nbytes(model, torch.bfloat16, 1, torch.device("cuda"))

    def most(kv: str, state_dtype: str | None) -> int:
        ladder = make_ladder(resolve_kv(kv, state_dtype), model, torch.bfloat16, max_model_len=32_768)
        return largest_batch(ladder, left, 32_768)

    assert most("bf16", "float32") == 4 and most("auto", "float32") == 12
    assert most("auto", None) == most("auto", "int16") == 14
