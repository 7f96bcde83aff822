"""Quantized weights on a GPU in bfloat16: log-probabilities beside the CPU's with the same weights unpacked."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
import transformers

from qkv_engine import Engine, SamplingParams

from ..models.conftest import config_class, fill
from .test_families import HEAD, PROMPTS, SIZES

pytestmark = pytest.mark.gpu

SHAPE = {**SIZES, "hidden_size": 512, "intermediate_size": 768, "tie_word_embeddings": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
# Of what plain weights differ by; unpacked ones are rounded. Activations of 8 bits, which prompts have where
# weights are 8-bit floats, add to it.
ERROR_RATIO = {"int8": 2.0, "int4": 2.0, "fp8": 15.0}
PROMPTS_AND_BATCHES = [*PROMPTS, *([*HEAD, 40 + i] for i in range(33))]  # steps of 40 rows, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random values in all its parameters."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config_class("Qwen3")(**SHAPE)).eval()
    fill(model)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def mean_error(folder: Path, weights: str | None, warm_up: str) -> tuple[float, list[list[int]]]:
    """Mean difference of the log-probabilities of the GPU's tokens from the CPU's, and those tokens."""
    options = {"weights": weights, "max_model_len": 1024, "max_num_seqs": 64, "kv_memory": "256MiB"}
    with Engine(folder, device="cuda", dtype="bfloat16", kv="bf16", warm_up=warm_up, **options) as engine:
        outputs = engine.generate(PROMPTS_AND_BATCHES, GREEDY)
        graphs = engine._started.core.runner.backend.steps._graphs
        assert graphs._works and len(graphs) >= 3
    with Engine(folder, device="cpu", dtype="bfloat16", kv="bf16", **options) as engine:
        scored = engine.generate([each.prompt_token_ids + each.outputs[0].token_ids for each in outputs], SCORE)
    errors = []
    for output, score in zip(outputs, scored, strict=True):
        found = output.outputs[0]
        assert found.logprobs is not None and score.prompt_logprobs is not None
        entries = score.prompt_logprobs[len(output.prompt_token_ids) :]
        for token, mine, theirs in zip(found.token_ids, found.logprobs, entries, strict=True):
            assert theirs is not None
            errors.append(abs(mine[token].logprob - theirs[token].logprob))
    return fmean(errors), [each.outputs[0].token_ids for each in outputs]


@pytest.fixture(scope="module")
def plain_error(folder: Path) -> float:
    return mean_error(folder, None, "lazy")[0]


@pytest.mark.parametrize("weights", ERROR_RATIO)
def test_quantized_on_load(weights: str, folder: Path, plain_error: float, report: list[str]) -> None:
    """All rows that steps have: one, few, a prompt's chunks; captured when met, and at start."""
    lazy, tokens = mean_error(folder, weights, "lazy")
    full, again = mean_error(folder, weights, "full")
    report.append(f"{weights}: mean error {lazy:.4f}, captured at start {full:.4f}; plain bf16 {plain_error:.4f}")
    assert max(lazy, full) <= ERROR_RATIO[weights] * plain_error
    assert tokens == again
