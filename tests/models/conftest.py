"""Shared by the model tests: small models written by transformers, and the dense cache they are run with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from qkv_engine.errors import ModelError
from qkv_engine.kernels.delta_net import DeltaWeights, reference
from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.kernels.rope_kv_write.cpu import rotate
from qkv_engine.kernels.rope_kv_write.key_basis import in_basis
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.loader import LoadedModel, load_model
from qkv_engine.models.rope import Rotation

CPU = torch.device("cpu")
DEMO = Path(__file__).resolve().parents[2] / "engine" / "assets" / "demo"
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class DenseBatch:
    """Causal grouped-query attention over one request, which grows by any number of tokens a step: the oracle.

    ``specs``: of each layer, for the heads of one rank.
    """

    def __init__(self, specs: Sequence[AttentionSpec]) -> None:
        self.specs = specs
        self.recurrent: dict[int, Tensor] = {}
        self.conv: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        num_heads, num_kv_heads, _, scale, window, softcap, _ = self.specs[layer]
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        rotate(qk if norm is None else norm(qk), *rotation, out=qk)
        q, k = qk.split((num_heads, num_kv_heads), dim=1)
        if key_basis is not None:
            q, k = in_basis(q, key_basis.q), in_basis(k, key_basis.k)
        if layer in self.keys and torch.equal(self.keys[layer][-len(k) :], k):  # a reader of the layer's KV
            k, v = self.keys[layer], self.values[layer]
        elif layer in self.keys:
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k.clone(), v.clone()
        new, total = q.shape[0], k.shape[0]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        age = torch.arange(total - new, total)[:, None] - torch.arange(total)
        hidden = (age < 0) | (age >= (window or total))
        scores = scores.masked_fill(hidden, float("-inf"))
        if null_logits is not None:
            scores = torch.cat((scores, null_logits.float().view(-1, 1, 1).expand(-1, new, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :total]
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        spec = weights.spec
        conv = self.conv.get(layer, qkv.new_zeros(spec.conv_shape))
        recurrent = self.recurrent.get(layer, torch.zeros(spec.recurrent_shape))
        mixed, self.conv[layer] = reference.short_conv(qkv, conv, weights.conv)
        gates = reference.gates(b, a, weights.decay, weights.dt_bias)
        out, self.recurrent[layer] = reference.delta_rule(*spec.split(mixed), *gates, recurrent)
        return reference.gated_rms_norm(out, z, weights.norm, weights.eps)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., Tensor]:
    """Logits ``[N, V]`` of a loaded model over one sequence, fed in steps of the given sizes (all at once without)."""

    def run(loaded: LoadedModel, ids: Tensor, steps: tuple[int, ...] = ()) -> Tensor:
        batch, logits, start = DenseBatch(loaded.config.attention), [], 0
        with torch.inference_mode():
            for size in steps or (len(ids),):
                positions = torch.arange(start, start + size)
                hidden = loaded.model(ids[start : start + size], positions, batch)
                logits.append(loaded.model.compute_logits(hidden))
                start += size
        assert start == len(ids)
        return torch.cat(logits)

    return run


def config_class(family: str) -> Callable[..., transformers.PreTrainedConfig]:
    """transformers' configuration of a family."""
    name = {name: f"{name}Text" for name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")}.get(family, family)
    found: Callable[..., transformers.PreTrainedConfig] = getattr(transformers, f"{name}Config")
    return found


def fill(reference: torch.nn.Module) -> None:
    """Random values in all parameters, so that none is a no-op."""
    is_gemma4, is_hybrid = (type(reference).__name__.startswith(name) for name in ("Gemma4", ("Qwen3Next", "Qwen3_5")))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.3 if is_norm or "bias" in name else 0.15)
            if is_gemma4 and "q_norm" in name:
                parameter.mul_(0.2)  # in place of a scale of scores
            if is_hybrid and is_norm and "linear_attn" not in name:
                parameter.sub_(1.0)  # weights count from 1: twice that, layer after layer, would amplify roundings
        for name, buffer in reference.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)


@pytest.fixture(scope="session")
def make_reference() -> Callable[..., transformers.PreTrainedModel]:
    """A random transformers model of a family, biases and norms included, so that no parameter is a no-op."""

    def make(family: str, **changes: object) -> transformers.PreTrainedModel:
        torch.manual_seed(0)
        config = config_class(family)(**{**TINY, **changes})
        config._experts_implementation = "eager"  # torch's grouped product takes no odd sizes
        config._attn_implementation = "eager"  # torch's attention, which transformers 5.17 takes, has no soft cap
        reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        fill(reference)
        return reference

    return make


@pytest.fixture
def saved(make_reference: Callable[..., transformers.PreTrainedModel], tmp_path: Path) -> Callable[..., Any]:
    """Writes a random transformers model into ``tmp_path``, and returns it."""

    def save(family: str, changes: dict[str, Any]) -> transformers.PreTrainedModel:
        reference = make_reference(family, **changes)
        reference.save_pretrained(tmp_path)
        return reference

    return save


@pytest.fixture
def tiny_folder(tmp_path: Path, make_reference: Callable[..., transformers.PreTrainedModel]) -> Path:
    """A Llama checkpoint in one file, to be damaged by the test."""
    folder = tmp_path / "tiny"
    make_reference("Llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def load() -> Callable[..., LoadedModel]:
    def load_on_cpu(model: object, **options: object) -> LoadedModel:
        return load_model(str(model), device=CPU, **options)

    return load_on_cpu


@pytest.fixture
def refuses(load: Callable[..., LoadedModel]) -> Callable[..., None]:
    """Assert that loading fails with a ModelError whose message matches."""

    def check(folder: Path, message: str, **options: object) -> None:
        with pytest.raises(ModelError, match=f"(?s){message}"):
            load(folder, **options)

    return check


@pytest.fixture(scope="session")
def dense_batch() -> type[DenseBatch]:
    return DenseBatch


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return DEMO
