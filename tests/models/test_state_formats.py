"""Hybrids whose states are stored in codes: bytes, tokens, ranks, and steps that break off."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from qkv_engine import ConfigError, Engine, SamplingParams
from qkv_engine.bench.sizing import largest_batch, make_ladder
from qkv_engine.config import STATE_DTYPES
from qkv_engine.device.cpu.states import CpuStates
from qkv_engine.kernels.delta_net import STATE_FORMATS, DeltaWeights, StateSpec
from qkv_engine.kernels.delta_net.formats import StateFormat, decode, encode
from qkv_engine.loading import with_weights
from qkv_engine.models.loader import LoadedModel, weights_nbytes
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import resolve_kv

from .conftest import DEMO, DenseBatch
from .test_families import HYBRID, load_for

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
CODES = STATE_DTYPES[1:]


@pytest.fixture
def folder(saved: Callable[..., transformers.PreTrainedModel], tmp_path: Path) -> Path:
    """A Qwen3.5 checkpoint with three layers of states and one of attention."""
    saved("Qwen3_5", HYBRID | {"intermediate_size": 88})
    return tmp_path


def prompts(number: int, seed: int = 0, least: int = 1, most: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 97) for _ in range(rng.randint(least, most))] for _ in range(number)]


def tokens(folder: Path, work: list[list[int]], state_dtype: str | None, **options: Any) -> list[list[int]]:
    options = {"kv": "fp32", "kv_memory": "4MiB", "num_threads": 1} | options
    with Engine(folder, device="cpu", state_dtype=state_dtype, **options) as engine:
        return [output.token_ids for output in engine.generate(work, GREEDY)]


class CodedBatch(DenseBatch):
    """The oracle, whose states are rounded to a format behind each step."""

    def __init__(self, loaded: LoadedModel, fmt: StateFormat):
        super().__init__(loaded.config.attention)
        self.fmt = fmt

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        out = super().delta_net(layer, qkv, z, b, a, weights)
        self.recurrent[layer] = decode(encode(self.recurrent[layer], self.fmt))
        return out


def expected(loaded: LoadedModel, prompt: list[int], fmt: StateFormat) -> list[int]:
    """Greedy tokens of the oracle, which takes the prompt as one step."""
    batch, ids, start = CodedBatch(loaded, fmt), list(prompt), 0
    with torch.inference_mode():
        while len(ids) < len(prompt) + 30:
            hidden = loaded.model(torch.tensor(ids[start:]), torch.arange(start, len(ids)), batch)
            start = len(ids)
            ids.append(int(loaded.model.compute_logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]


def test_the_options_are_the_formats() -> None:
    assert tuple(STATE_FORMATS) == STATE_DTYPES


@pytest.mark.parametrize("state_dtype", CODES)
def test_tokens_are_those_of_states_rounded_behind_each_step(folder: Path, state_dtype: str) -> None:
    work, loaded = prompts(4), load_for(folder)
    assert tokens(folder, work, state_dtype) == [expected(loaded, each, STATE_FORMATS[state_dtype]) for each in work]


@pytest.mark.parametrize(("state_dtype", "bits"), [("int16", 16), ("int8", 8)])
def test_slots_shrink_and_more_requests_fit(folder: Path, state_dtype: str, bits: int) -> None:
    found = []
    for dtype in (None, state_dtype):
        with Engine(folder, kv="fp32", kv_memory="1MiB", device="cpu", state_dtype=dtype, max_model_len=60) as engine:
            (spec,) = set(engine._started.ladder.states)
            tables = engine._started.core.space.tables
            assert tables.demand(1, 0)[spec.nbytes(torch.float32)] == 3
            found.append((spec.conv_offset, tables.max_requests(50, 0)))
    (wide, few), (narrow, many) = found
    elements, columns = 6 * 12 * 10, 6 * 10
    assert wide == -(-4 * elements // 128) * 128 and many > few
    assert narrow == -(-bits // 8 * elements // 128) * 128 + -(-4 * columns // 128) * 128


@pytest.mark.parametrize("state_dtype", CODES)
def test_requests_computed_again_end(folder: Path, state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted ones, in too little memory, and all, behind steps that broke off between two states."""
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    work, compute, calls = prompts(8, seed=1, least=100, most=127), CpuStates.delta_net, 0
    with Engine(folder, kv="fp32", kv_memory="256KiB", device="cpu", state_dtype=state_dtype) as engine:
        first = engine.generate(work, GREEDY)
        assert engine.stats().num_preemptions and not any(output.error for output in first)
        engine._started.core.space.tables.check_integrity()

        def broken(self: CpuStates, layer: int, *rest: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls % 60 == 0 and layer == 1:
                raise KeyError("injected")
            return compute(self, layer, *rest)

        monkeypatch.setattr(CpuStates, "delta_net", broken)
        outputs = engine.generate(work, GREEDY)
    assert calls > 60 and [len(output.token_ids) for output in outputs] == [30] * 8


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(folder: Path) -> None:
    """A column of a head, which shares a scale, is never split."""
    work = prompts(4, seed=2)
    assert tokens(folder, work, "int8") == tokens(folder, work, "int8", tensor_parallel=2, kv_memory="2MiB")


def test_a_fit_counts_states_as_they_are_stored(folder: Path) -> None:
    from qkv_engine import Fit

    fit = Fit(context=60, requests=2, memory="2MiB")
    with Engine(folder, device="cpu", state_dtype="int8", fit=fit) as engine:
        assert engine._started.ladder.states[0].format is STATE_FORMATS["int8"]


@pytest.mark.parametrize(("model", "value", "why"), [(None, "int8", "keeps no states"), (None, "int4", "unknown")])
def test_what_cannot_be_is_refused(model: str | None, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)state_dtype.*{why}"):
        Engine(model or DEMO, device="cpu", state_dtype=value)


def test_bytes_of_a_large_layer() -> None:
    """Qwen3.5 27B: 8.25 and 16.25 bits an element, scales counted."""
    spec = StateSpec(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128, conv_width=4)
    bits = [8 * spec._replace(format=fmt).conv_offset / (48 * 128 * 128) for fmt in STATE_FORMATS.values()]
    assert bits == [32, 16.25, 8.25]


def test_a_27b_model_in_24_gib_holds_three_times_the_requests() -> None:
    """Weights of 4 bits and requests of 32,768 tokens, and of 4,096, by the cache's own admission."""
    model = with_weights(config_from_hf(SHAPES["qwen3.5-27b"]), "int4")
    left = 24 * 2**30 - weights_nbytes(model, torch.bfloat16, 1, torch.device("cuda"))

    def most(kv: str, state_dtype: str, context: int) -> int:
        ladder = make_ladder(resolve_kv(kv, state_dtype), model, torch.bfloat16, max_model_len=context)
        return largest_batch(ladder, left, context)

    for context, wide, narrow in ((32_768, 4, [12, 14, 15]), (4096, 22, [39, 58, 76])):
        assert most("bf16", "float32", context) == wide
        assert [most("auto", dtype, context) for dtype in STATE_DTYPES] == narrow
