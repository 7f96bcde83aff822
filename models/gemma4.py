"""Gemma 4, text: two head sizes; the last layers read the KV of earlier ones; an embedding for each layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionBatch
from .attention_spec import AttentionSpec
from .config import FULL, SLIDING, ModelConfig, read_biases, read_full_every, read_softcap
from .fields import Fields
from .layers import CheckpointRows, Embedding, Layer, Linear, Norm, RMSNorm, RowParallelLinear, taken
from .llama import MLP, LlamaForCausalLM, LlamaModel, make_norm
from .ranks import ALONE, Ranks
from .rope import Rotation, read_ropes, with_default_rope

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 512,
}
_ROPES = {
    SLIDING: {"rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """``attention`` has an entry for each layer with KV of its own, ``ropes`` and ``kv_layers`` one for every layer.

    ``kv_layers``: the entry of ``attention`` whose KV a layer reads. ``keys_are_values``: the same for its projection.
    ``layer_vocab_size`` and ``layer_embedding_size`` are those of the embedding for each layer, size 0 for none.
    """

    kv_layers: tuple[int, ...]
    keys_are_values: tuple[bool, ...]
    has_wide_readers: bool
    layer_vocab_size: int
    layer_embedding_size: int

    @property
    def head_dims(self) -> tuple[int, ...]:
        """See ``ModelConfig.head_dims``."""
        return tuple(self.attention[layer].head_dim for layer in self.kv_layers)

    @property
    def last_attention(self) -> int | None:
        """See ``ModelConfig.last_attention``; None where the last layer reads the KV of another."""
        last = self.kv_layers[-1]
        return last if self.kv_layers.count(last) == 1 else None


def read_gemma4(fields: Fields) -> ModelConfig:
    """Gemma 4, text."""
    fields = with_default_rope(fields.given(**_DEFAULTS), _ROPES)
    for name in ("enable_moe_block", "use_bidirectional_attention"):
        if fields.get(name) not in (None, False, "vision"):  # vision tokens see later ones; there are none
            raise fields.error(name, "is not supported")
    kinds = read_full_every(fields, 6)
    kinds = (*kinds[:-1], FULL)
    ropes = read_ropes(fields, {FULL: 1_000_000.0, SLIDING: 10_000.0})
    num_readers = fields.integer("num_kv_shared_layers", 0, len(kinds) - 1, default=0)
    owners = kinds[: len(kinds) - num_readers]
    if set(owners) != set(kinds):
        raise fields.error("num_kv_shared_layers", "leaves a kind of layers without KV to read")
    last = {kind: layer for layer, kind in enumerate(owners)}
    shares_keys = fields.boolean("attention_k_eq_v", default=False)
    config = Gemma4Config.read(
        fields,
        layer_types=kinds,
        ropes=[ropes[kind] for kind in kinds],
        scale=1.0,
        activation_field="hidden_activation",
        **read_biases(fields),
        embedding_multiplier=fields.integer("hidden_size", 1, 2**20) ** 0.5,
        logit_softcap=read_softcap(fields, "final_logit_softcapping"),
        kv_layers=(*range(len(owners)), *(last[kind] for kind in kinds[len(owners) :])),
        keys_are_values=tuple(shares_keys and kind == FULL for kind in owners),
        has_wide_readers=fields.boolean("use_double_wide_mlp", default=False),
        layer_vocab_size=fields.integer("vocab_size_per_layer_input", 1, 2**24, default=262_144),
        layer_embedding_size=fields.integer("hidden_size_per_layer_input", 0, 2**16, default=256),
    )
    specs = zip(config.attention, owners, strict=False)
    return replace(config, attention=tuple(_with_heads(fields, *each, layer) for layer, each in enumerate(specs)))


def _with_heads(fields: Fields, spec: AttentionSpec, kind: str, layer: int) -> AttentionSpec:
    """``spec`` with the layer's own heads, of ``per_layer_config`` or of the fields for layers without a window."""
    found: dict[str, Any] = {}
    if fields.get("per_layer_config") is not None:
        layers = Fields(fields.get("per_layer_config"), "per_layer_config").values  # by numbers of equal width
        found = next((own for name, own in layers.items() if (name.lstrip("0") or "0") == str(layer)), {})
    elif kind == FULL:
        found["head_dim"] = fields.given(global_head_dim=512).get("global_head_dim")
        if fields.get("attention_k_eq_v"):
            found["num_key_value_heads"] = fields.get("num_global_key_value_heads")
    own = Fields(found, f"per_layer_config.{layer}")
    head_dim = own.integer("head_dim", 2, 512, default=spec.head_dim)
    num_kv_heads = own.integer("num_key_value_heads", 1, spec.num_heads, default=spec.num_kv_heads)
    if head_dim % 2 or spec.num_heads % num_kv_heads:
        raise own.error("head_dim", f"must be even, and num_key_value_heads divide {spec.num_heads}")
    return spec._replace(head_dim=head_dim, num_kv_heads=num_kv_heads)


class LayerScalar(Norm):
    """A factor of a layer's result."""

    def forward(self, x: Tensor) -> Tensor:
        """x and result [N, E]."""
        return x * self.weight

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        yield CheckpointRows(self.name, (1,), self.weight, 0, 1)


class Gemma4Attention(Layer):
    """Attention over the KV of the layer itself or of an earlier one, with norms over each head of q, k and v."""

    def __init__(self, config: Gemma4Config, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        self.kv_layer = config.kv_layers[layer]
        self.is_owner = self.kv_layer == layer
        spec, self.keys_are_values = config.attention[self.kv_layer], config.keys_are_values[self.kv_layer]
        heads, kv_heads, self.head_dim = ranks.part(spec.num_heads), ranks.part(spec.num_kv_heads), spec.head_dim
        self.num_heads, self.num_kv_heads, self.eps = heads.size, kv_heads.size, config.norm_eps
        queries, keys = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        shards = {"q_proj": queries}
        if self.is_owner:
            shards["k_proj"] = keys
            self.k_norm = RMSNorm("k_norm", self.head_dim, self.eps)
            if not self.keys_are_values:
                shards["v_proj"] = keys
        self.q_norm = RMSNorm("q_norm", self.head_dim, self.eps)
        self.qkv_proj = Linear(config.hidden_size, shards, bias=config.attention_bias)
        out = {"o_proj": config.hidden_size}
        self.o_proj = RowParallelLinear(queries, out, ranks, bias=config.attention_output_bias)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        shared: dict[int, Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """x [N, E] -> [M, E], of the tokens ``rows`` [M]; ``None``: all.

        ``shared`` has keys and values [N, 2 H, D] by layer; readers write them once more.
        """
        projected = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q = self._norm(self.q_norm, projected[:, : self.num_heads])
        if self.is_owner:
            k = projected[:, self.num_heads : self.num_heads + self.num_kv_heads]
            v = k if self.keys_are_values else projected[:, self.num_heads + self.num_kv_heads :]
            v = F.rms_norm(v, (self.head_dim,), None, self.eps)
            shared[self.kv_layer] = torch.cat((self._norm(self.k_norm, k), v), dim=1)
        attended = batch.attend(self.kv_layer, torch.cat((q, shared[self.kv_layer]), dim=1), rotation, None)
        out: Tensor = self.o_proj(taken(attended.reshape(len(x), -1), rows))
        return out

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        normed: Tensor = norm(x.reshape(-1, self.head_dim), None)[0]
        return normed.view(x.shape)


class Gemma4Layer(Layer):
    """Norms before and after attention and MLP, then the layer's own embedding behind a gate."""

    def __init__(self, config: Gemma4Config, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        self.input_layernorm = make_norm(config, "input_layernorm")
        self.self_attn = Gemma4Attention(config, layer, ranks)
        self.post_attention_layernorm = make_norm(config, "post_attention_layernorm")
        self.pre_feedforward_layernorm = make_norm(config, "pre_feedforward_layernorm")
        is_wide = config.has_wide_readers and not self.self_attn.is_owner
        self.mlp = MLP(replace(config, intermediate_size=config.intermediate_size * (1 + is_wide)), ranks)
        self.post_feedforward_layernorm = make_norm(config, "post_feedforward_layernorm")
        size, hidden = config.layer_embedding_size, config.hidden_size
        if size:
            self.gate = Linear(hidden, {"per_layer_input_gate": size}, bias=False)
            self.projection = Linear(size, {"per_layer_projection": hidden}, bias=False)
            self.post_per_layer_input_norm = make_norm(config, "post_per_layer_input_norm")
        self.scalar = LayerScalar("layer_scalar", 1, 0.0)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        shared: dict[int, Tensor],
        embedded: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x [N, E] -> [M, E], of the tokens ``rows``; ``embedded`` [N, P], the tokens' embedding for the layer."""
        attended = self.self_attn(self.input_layernorm(x, None)[0], rotation, batch, shared, rows)
        normed, x = self.pre_feedforward_layernorm(self.post_attention_layernorm(attended, None)[0], taken(x, rows))
        x = x + self.post_feedforward_layernorm(self.mlp(normed), None)[0]
        if embedded is not None:
            gated = F.gelu(self.gate(x), approximate="tanh") * taken(embedded, rows)
            x = x + self.post_per_layer_input_norm(self.projection(gated), None)[0]
        scaled: Tensor = self.scalar(x)
        return scaled


class Gemma4Model(LlamaModel):
    """Llama's embedding, layers and final norm, and an embedding for each layer."""

    def __init__(self, config: Gemma4Config, layer_class: type[Layer], ranks: Ranks = ALONE):
        super().__init__(config, layer_class, ranks)
        self.num_layers, self.size = len(config.ropes), config.layer_embedding_size
        self.scale = config.hidden_size**-0.5
        if self.size:
            width, name = self.num_layers * self.size, "embed_tokens_per_layer"
            self.embed_tokens_per_layer = Embedding(name, config.layer_vocab_size, width, self.size**0.5)
            self.layer_projection = Linear(config.hidden_size, {"per_layer_model_projection": width}, bias=False)
            self.layer_norm = RMSNorm("per_layer_projection_norm", self.size, config.norm_eps)

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None = None
    ) -> Tensor:
        x, shared = self.embed_tokens(input_ids), dict[int, Tensor]()
        embedded, rotations = self._embed_for_layers(input_ids, x), self.rotary_emb(positions)
        parts = zip(self.layers, rotations, embedded, self.rows_by_layer(rows), strict=True)
        for layer, rotation, own, layer_rows in parts:
            x = layer(x, rotation, batch, shared, own, layer_rows)
        out: Tensor = self.norm(x, None)[0]
        return out

    def _embed_for_layers(self, input_ids: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        """The embedding of each layer's own [N, P]."""
        if not self.size:
            return [None] * self.num_layers
        projected = self.layer_projection(x) * self.scale
        projected = self.layer_norm(projected.view(-1, self.size), None)[0].view_as(projected)
        both = (projected + self.embed_tokens_per_layer(input_ids)) * 2**-0.5
        own: tuple[Tensor, ...] = both.view(len(x), self.num_layers, self.size).unbind(1)
        return own


class Gemma4ForCausalLM(LlamaForCausalLM):
    """Gemma 4, text."""

    layer_class = Gemma4Layer
    model_class = Gemma4Model

    def ignores(self, name: str) -> bool:
        """See ``LlamaForCausalLM.ignores``: here also projections of layers that read another's KV."""
        found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+", name)
        return super().ignores(name) or (found is not None and int(found[1]) >= self.config.num_layers)
