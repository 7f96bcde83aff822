"""The key scale: it changes no logits in full precision, divides K as it says, and is found where it helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qkv_engine import ConfigError, Engine, SamplingParams
from qkv_engine.config import EngineConfig
from qkv_engine.loading import load
from qkv_engine.models.key_scale import fold_key_scale
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.plan_file import plan_bytes
from qkv_engine.planner import key_scale as search
from qkv_engine.planner.gradients import Text
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.plan import read_plan
from qkv_engine.planner.sequence import Heads, SequenceBatch, run
from qkv_engine.presets import PRESETS, resolve_kv

from ..models.test_families import FAMILY_CASES, case_id
from ..models.tiny import write_tiny
from .test_gradients import CPU, FAMILIES, random_ids
from .test_plan import plan_for

SCALABLE = FAMILIES + [each for each in FAMILY_CASES if each[0] in ("Cohere2", "Gemma3", "Phi3")]


class KeysBatch(SequenceBatch):
    """Keeps the keys of all layers."""

    keys: list[Tensor]

    def attend_heads(self, layer: int, heads: Heads, null_logits: Tensor | None) -> Tensor:
        self.keys = [*([] if layer == 0 else self.keys), heads.k]
        return super().attend_heads(layer, heads, null_logits)


@torch.no_grad()
def keys_and_logits(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """K [layers, N, H, D] after the rotation, and logits [N, V]."""
    batch = KeysBatch(model.config.attention)
    logits = model.compute_logits(run(model, ids, batch))
    return torch.stack(batch.keys), logits


def random_scale(model: LlamaForCausalLM) -> Tensor:
    """Divisors from 1/8 to 8."""
    config = model.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim // 2)
    return 2 ** (6 * torch.rand(shape, generator=torch.Generator().manual_seed(3)) - 3)


@pytest.mark.parametrize(("family", "changes"), SCALABLE, ids=case_id)
def test_full_precision_attention_is_unchanged(pair):
    """Golden check 21: biases, grouped queries, q/k norms, windows, and heads of which a part rotates."""
    _, model = pair
    ids, scale = torch.tensor(random_ids(40)), random_scale(model)
    keys, logits = keys_and_logits(model, ids)
    fold_key_scale(model, scale.tolist())
    scaled_keys, same_logits = keys_and_logits(model, ids)
    torch.testing.assert_close(same_logits, logits, rtol=1e-5, atol=1e-5 * float(logits.abs().max()))
    torch.testing.assert_close(
        scaled_keys * scale.repeat(1, 1, 2).unsqueeze(1), keys, rtol=1e-5, atol=1e-5 * float(keys.abs().max())
    )


@pytest.mark.parametrize(("family", "changes"), FAMILIES[:1], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda scale: scale[:1],
        lambda scale: [scale[0], scale[1][:1]],
        lambda scale: [[[0.0] * 8] * 2] * 2,
        lambda scale: [[[float("inf")] * 8] * 2] * 2,
        lambda scale: [[["1"] * 8] * 2] * 2,
    ],
)
def test_other_shapes_and_values_are_refused(pair, change: Callable):
    _, model = pair
    with pytest.raises(ConfigError, match=r"key_scale.*Give 2 layers of 2 KV heads of 8 pairs"):
        fold_key_scale(model, change(random_scale(model).tolist()))


@pytest.mark.parametrize(("family", "changes"), [each for each in FAMILY_CASES if each[0] == "Olmo2"], ids=case_id)
def test_keys_normed_otherwise_are_not_scaled(pair):
    _, model = pair
    with pytest.raises(ConfigError, match="keys of this model cannot be scaled"):
        search.key_peaks(model, Text(random_ids(9)))


@pytest.mark.parametrize(("family", "changes"), [FAMILIES[0], FAMILIES[3]], ids=str)
def test_the_search_tames_channels_that_stand_out(pair):
    """A model whose keys were made uneven by a scale of ours: the search undoes most of it."""
    _, model = pair
    text = Text(random_ids(60))
    fold_key_scale(model, (1 / random_scale(model) ** 2).tolist())
    peaks = search.key_peaks(model, text)
    keys, _ = keys_and_logits(model, torch.tensor(text.token_ids))
    first, second = keys.abs().amax(1).chunk(2, -1)
    torch.testing.assert_close(peaks, first.maximum(second))
    errors = search.output_errors(model, text, peaks)
    assert errors.shape == (2, 21) and bool((errors.amin(1) < 0.5 * errors[:, -1]).all()), "alpha 0 leaves K as it is"
    scale = torch.tensor(search.best_key_scale(peaks, errors))
    best = [search.ALPHAS[index] for index in errors.argmin(1).tolist()]
    torch.testing.assert_close(scale, torch.stack([p**a for p, a in zip(peaks, best, strict=True)]), rtol=1e-5, atol=0)


def test_of_equal_errors_the_larger_alpha_is_taken_and_divisors_are_bounded():
    peaks = torch.tensor([[[0.0, 4.0, 1e9]]])
    scale = search.best_key_scale(peaks, torch.ones(1, 21))
    assert scale == (((1e-4, 4.0, 1e4),),)
    assert search.ALPHAS[0] == 1 and search.ALPHAS[-1] == 0 and len(search.ALPHAS) == 21


def test_a_layer_that_scaling_harms_stays_as_it_is():
    errors = torch.ones(2, 21)
    errors[0, -1], errors[1, 0] = 0.5, 0.5
    scale = search.best_key_scale(torch.tensor([[[3.0, 0.2]], [[3.0, 0.2]]]), errors)
    assert scale == (((1.0, 1.0),), ((3.0, 0.2),))


def test_an_engine_folds_the_scale_of_its_plan(tmp_path: Path):
    """The same tokens as without it, since nothing is quantized; the keys that its cache holds are divided."""
    folder = write_tiny(tmp_path / "model")
    path = tmp_path / "mine.json"
    plan = json.loads(plan_bytes(plan_for(folder, KVmix())))
    plan["profile"]["key_scale"] = [[[0.25 + p / 4 for p in range(8)]]] * 2
    plan["ladder"] = {"rungs": plan["ladder"]["rungs"][:1], "sink": 0, "recent": 0, "recent_ratio": 0, "eager": False}
    path.write_text(json.dumps(plan))
    assert read_plan(path).config("mine").key_scale == ((tuple(0.25 + p / 4 for p in range(8)),),) * 2
    prompt, params = [3 + n % 50 for n in range(60)], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    outputs = []
    for kv in ("fp32", path):
        with Engine(str(folder), kv=kv, kv_memory="16MiB") as engine:
            outputs.append(engine.generate([prompt], params)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    plain, scaled = (
        load(EngineConfig(model=str(folder), kv=resolve_kv(kv)), CPU, pack=False)[0] for kv in ("fp32", path)
    )
    rows = [loaded.model.model.layers[1].self_attn.qkv_proj.weight[32:40] for loaded in (plain, scaled)]
    divisors = torch.tensor([0.25 + p / 4 for p in range(8)])
    torch.testing.assert_close(rows[1] * divisors[:, None], rows[0])


@pytest.mark.gpu
def test_a_gpu_finds_the_cpus_peaks_and_errors():
    text = Text(torch.randint(5, 1024, (300,), generator=torch.Generator().manual_seed(0)).tolist())
    found = []
    for device in ("cpu", "cuda"):
        model = load(EngineConfig(kv=PRESETS["bf16"], dtype="float32"), torch.device(device), pack=False)[0].model
        peaks = search.key_peaks(model, text)
        errors = search.output_errors(model, text, peaks)
        fold_key_scale(model, search.best_key_scale(peaks, errors))
        found.append((peaks.cpu(), errors.cpu()))
    torch.testing.assert_close(*(peaks for peaks, _ in found), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(*(errors for _, errors in found), rtol=0.1, atol=1e-4)
