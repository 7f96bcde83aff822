"""Mixture of experts: what a checkpoint may hold, low precision, pressure, and the bytes that a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv_engine import Engine, ModelError, SamplingParams
from qkv_engine.bench.roofline import count_weights, limit_seconds
from qkv_engine.errors import ConfigError
from qkv_engine.models import checkpoint
from qkv_engine.models.loader import LoadedModel, find_model, load_weights, num_parameters
from qkv_engine.models.ranks import Ranks
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS

from .conftest import CPU
from .test_engine_parity import assert_greedy
from .test_families import FAMILY_CASES, GPT_OSS, IDS

MOE_CASES = {family: changes for family, changes in FAMILY_CASES if "num_experts_per_tok" in changes}
NEW_TOKENS = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
QWEN3, GPT = SHAPES["qwen3-30b-a3b"], SHAPES["gpt-oss-20b"]

each_family = pytest.mark.parametrize(("family", "changes"), MOE_CASES.items(), ids=list(MOE_CASES))
Save = Callable[..., transformers.PreTrainedModel]


@each_family
@pytest.mark.parametrize(("kv", "bound"), [("int8", 0.03), ("int4", 0.15)])
def test_low_precision_stays_near_transformers(
    family: str,
    changes: dict[str, Any],
    kv: str,
    bound: float,
    saved: Save,
    tmp_path: Path,
) -> None:
    """Log-probabilities of 150 tokens, each behind KV at low precision but for a window of recent tokens."""
    reference = saved(family, changes)
    first = 150
    with torch.inference_mode():
        theirs = reference(IDS[None]).logits[0].log_softmax(-1)[range(first - 1, 299), IDS[first:]]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, num_prefill_tokens=first)
    ladder = replace(PRESETS[kv], narrow_windows=True)
    with Engine(tmp_path, kv=ladder, kv_memory="8MiB", device="cpu") as engine:
        output = engine.generate([IDS.tolist()], params)[0]
    assert output.kv.lowest_bits == int(kv.removeprefix("int"))
    entries = zip((output.prompt_logprobs or [])[first:], IDS[first:].tolist(), strict=True)
    ours = torch.tensor([entry[token].logprob for entry, token in entries if entry is not None])
    assert (ours - theirs).norm() < bound * theirs.norm()


def test_tokens_under_pressure_with_shared_prefixes_equal_transformers(
    saved: Save,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gpt-oss: windows and null logits, blocks found in the prefix cache, and requests that give way and come back."""
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    reference = saved("GptOss", GPT_OSS)
    block_nbytes = 4 * 2 * 2 * 128 * 20 * 4
    prompts = [IDS[:260].tolist() + [number] * 20 for number in range(1, 7)]
    options: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 512}
    with Engine(tmp_path, kv="fp32", kv_memory=9 * block_nbytes, device="cpu", **options) as engine:
        engine.generate(prompts[:1], SamplingParams(max_tokens=1))
        params = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True, logprobs=0)
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hit_tokens >= 256
    for output in outputs:
        assert_greedy(reference, output, 140)


def test_two_processes_compute_the_tokens_of_transformers(saved: Save, tmp_path: Path) -> None:
    reference = saved("GptOss", GPT_OSS | {"intermediate_size": 90})
    with Engine(tmp_path, kv="fp32", kv_memory="8MiB", device="cpu", num_threads=1, tensor_parallel=2) as engine:
        outputs = engine.generate([IDS[:129].tolist(), IDS[:5].tolist()], GREEDY)
    for output in outputs:
        assert_greedy(reference, output, NEW_TOKENS)


@each_family
def test_weights_are_the_same_however_a_checkpoint_is_read(
    family: str,
    changes: dict[str, Any],
    saved: Save,
    logits_of: Callable[..., Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row or a few at a time: borders of pieces lie within experts."""
    saved(family, changes)
    expected = logits_of(load(tmp_path), IDS[:40])
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 5000)
    assert torch.equal(logits_of(load(tmp_path), IDS[:40]), expected)


def test_a_missing_expert_is_named(saved: Save, tmp_path: Path) -> None:
    saved("Mixtral", MOE_CASES["Mixtral"] | {"num_local_experts": 7})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.experts.6.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack model\.layers\.2\.block_sparse_moe\.experts\.6\.w2\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["GptOss", "GraniteMoeShared"])
def test_random_weights_that_ranks_share_are_equal(family: str, saved: Save, tmp_path: Path) -> None:
    saved(family, MOE_CASES[family] | {"intermediate_size": 90, "shared_intermediate_size": 32})
    first, second = (load(tmp_path, load_format="random", ranks=Ranks(rank, 2)).model for rank in range(2))
    split = ("qkv", "o_proj.weight", "gate_up", "mlp.down", "shared_mlp.down", "null_logits")
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        is_split = any(part in name for part in split) and not name.endswith("down_bias")
        assert torch.equal(one, other) is not is_split, name


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (GPT, {"num_local_experts": 0}, "num_local_experts.*from 1"),
        (GPT, {"num_experts_per_tok": 33}, "num_experts_per_tok.*from 1 to 32"),
        (GPT, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act.*experts"),
        (GPT, {"swiglu_limit": -1}, "swiglu_limit"),
        (QWEN3, {"mlp_only_layers": [1.5]}, "mlp_only_layers.*list"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (QWEN3 | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}, {"clip_qkv": 8.0}, "clip_qkv"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_its_name(
    shape: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(shape | changes)


def test_inner_features_of_experts_must_divide() -> None:
    config = config_from_hf(QWEN3 | {"moe_intermediate_size": 770})
    config.check_ranks(2)
    with pytest.raises(ConfigError, match="770 inner features"):
        config.check_ranks(4)


def test_a_step_reads_the_experts_that_it_chooses() -> None:
    for hf, active, share in ((QWEN3, 3.04e9, 1 / 16), (GPT, 3.61e9, 1 / 8)):
        config = config_from_hf(hf)
        weights = count_weights(config, torch.bfloat16)
        assert weights.nbytes == pytest.approx(2 * num_parameters(config), rel=1e-3)
        assert weights.multiplied == pytest.approx(active, rel=0.01)
        assert weights.nbytes_read(1) == pytest.approx(2 * active, rel=0.01)
        embedding = 2 * config.vocab_size * config.hidden_size
        assert weights.nbytes_read(10_000) == pytest.approx(weights.nbytes - embedding)
        two = weights.nbytes_read(2) - weights.nbytes_read(1)
        assert two == pytest.approx(weights.expert_nbytes * share * (1 - share))
        assert limit_seconds(weights, 512, 0) < 11 * limit_seconds(weights, 1, 0)


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_weights(find_model(str(folder)), dtype=torch.float32, device=CPU, **options)
