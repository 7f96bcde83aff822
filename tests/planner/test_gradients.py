"""Gradient norms against transformers' autograd; the differentiable forward pass against the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
import transformers
from torch import Tensor

from qkv_engine import CapacityError, ModelError
from qkv_engine.config import EngineConfig
from qkv_engine.loading import load
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.planner import gradients
from qkv_engine.planner.gradients import Text, TextProfile, mean_profile, profile_text, profile_texts
from qkv_engine.planner.profile import LayerScores, Prompts
from qkv_engine.planner.sensitivity import Candidates
from qkv_engine.planner.sequence import SequenceBatch, run
from qkv_engine.presets import PRESETS

from ..models.conftest import DenseBatch
from ..models.test_families import FAMILY_CASES, case_id

CPU = torch.device("cpu")
NOTHING = Candidates({}, {})
FAMILIES = [
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
]
each_family = pytest.mark.parametrize(("family", "changes"), FAMILIES + FAMILY_CASES, ids=case_id)


def score_text(model: LlamaForCausalLM, text: Text) -> LayerScores:
    return profile_text(model, text, [NOTHING] * model.config.num_layers).scores


def random_ids(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def their_scores(reference: transformers.PreTrainedModel, text: Text) -> LayerScores:
    """Norms of the gradients that transformers' own loss leaves in k_proj and v_proj."""
    ids = torch.tensor(text.token_ids)[None]
    labels = ids.clone()
    labels[:, : text.first_label] = -100
    reference.zero_grad()
    reference(ids, labels=labels).loss.backward()
    attentions = [layer.self_attn for layer in reference.model.layers if hasattr(layer, "self_attn")]
    k, v = zip(*(each for attention in attentions for each in kv_gradients(attention)), strict=True)
    return LayerScores([float(each.norm()) for each in k], [float(each.norm()) for each in v])


def kv_gradients(attention: torch.nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of W_k and W_v of a layer that has them."""
    if hasattr(attention, "qkv_proj"):
        keys = attention.config.num_key_value_heads * attention.head_dim
        yield attention.qkv_proj.weight.grad[-2 * keys :].chunk(2)
    elif getattr(attention, "k_proj", None) is not None:
        yield attention.k_proj.weight.grad, (attention.v_proj or attention.k_proj).weight.grad


@each_family
@pytest.mark.parametrize("first_label", [1, 30])
def test_scores_equal_transformers_gradients(pair, first_label: int):
    reference, model = pair
    text = Text(random_ids(50), first_label)
    ours, theirs = score_text(model, text), their_scores(reference, text)
    assert ours.k == pytest.approx(theirs.k, rel=1e-4) and ours.v == pytest.approx(theirs.v, rel=1e-4)
    assert len(ours.k) == model.config.num_layers
    assert len(ours.k) == 1 or ours.k[0] != pytest.approx(ours.k[1], rel=1e-3)


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
def test_the_loss_in_pieces_is_the_loss(pair, monkeypatch: pytest.MonkeyPatch):
    _, model = pair
    text = Text(random_ids(20))
    whole = score_text(model, text)
    monkeypatch.setattr(gradients, "LOSS_ROWS", 7)
    assert score_text(model, text).k == pytest.approx(whole.k, rel=1e-5)


@each_family
def test_logits_equal_the_engines_forward(pair):
    _, model = pair
    ids = torch.tensor(random_ids(40))
    with torch.no_grad():
        plain = model.compute_logits(run(model, ids, SequenceBatch(model.config.attention)))
        batch = DenseBatch(model.config.attention)
        ours = model.compute_logits(model(ids, torch.arange(len(ids)), batch))
    torch.testing.assert_close(plain, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "changes"), FAMILIES[:1], ids=str)
def test_a_profile_is_the_mean_over_texts(pair):
    config, candidates = pair[1].config, Candidates({}, {"int2-token-128": None})
    prompts = Prompts(source="two", count=2, tokens=9, max_tokens=5)
    texts = [
        TextProfile(LayerScores([1.0, 2.0], [0.0, 4.0]), [], [[1.0, 2.0]], [2.0, 2.0], 0.5),
        TextProfile(LayerScores([3.0, 2.0], [1.0, 0.0]), [], [[3.0, 0.0]], [4.0, 2.0], 2.0),
    ]
    found = mean_profile(texts, config, torch.bfloat16, candidates, prompts)
    assert found.scores == LayerScores([2.0, 2.0], [0.5, 2.0]) and found.key_outliers == [3.0, 2.0]
    assert found.loss == 1.25
    assert found.sensitivities.v == {"int2-token-128": [2.0, 1.0]} and found.dtype == "bfloat16"
    with pytest.raises(ModelError, match="not finite"):
        mean_profile([texts[0]._replace(key_outliers=[float("nan"), 1])], config, CPU, candidates, prompts)


@pytest.mark.parametrize(("family", "changes"), FAMILIES[:1], ids=str)
def test_what_cannot_be_scored_is_an_error(pair, monkeypatch: pytest.MonkeyPatch):
    def exhausted(*_: object) -> TextProfile:
        raise torch.OutOfMemoryError

    _, model = pair
    with pytest.raises(ModelError, match=r"beyond the 97"):
        list(profile_texts(model, [Text([1, 97])], [NOTHING] * 2))
    monkeypatch.setattr(gradients, "profile_text", exhausted)
    with pytest.raises(CapacityError, match=r"3 tokens.*max_tokens"):
        list(profile_texts(model, [Text([1, 2, 3])], [NOTHING] * 2))


@pytest.mark.gpu
def test_a_gpu_gives_the_cpus_scores_in_bounded_memory():
    """In bfloat16, so roughly; the bytes are those of docs/plans.md."""
    text = Text(torch.randint(5, 1024, (1025,), generator=torch.Generator().manual_seed(0)).tolist())
    candidates = [Candidates.of(2, 128, torch.bfloat16)] * 8
    configs = [EngineConfig(kv=PRESETS["bf16"], dtype=dtype) for dtype in ("float32", "bfloat16")]
    on_cpu, on_gpu = (
        cast(LlamaForCausalLM, load(config, torch.device(device), pack=False)[0].model)
        for device, config in zip(("cpu", "cuda"), configs, strict=True)
    )
    profile_text(on_gpu, text, candidates)  # libraries allocate their workspaces
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found, expected = profile_text(on_gpu, text, candidates), profile_text(on_cpu, text, candidates)
    assert found.scores.k == pytest.approx(expected.scores.k, rel=0.1)
    assert found.scores.v == pytest.approx(expected.scores.v, rel=0.1)
    for ours, theirs in zip((*found.k[1:], *found.v[1:]), (*expected.k[1:], *expected.v[1:]), strict=True):
        assert ours == pytest.approx(theirs, rel=0.15)
    config, n = on_gpu.config, 1024
    hidden, keys = config.hidden_size, config.num_kv_heads * config.head_dim
    layer = 14 * hidden + 12 * config.intermediate_size + 28 * config.num_heads * config.head_dim + 33 * keys
    limit = n * config.num_layers * hidden * 2 + max(n * layer, 256 * config.vocab_size * 16)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * limit
