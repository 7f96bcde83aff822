"""Llama 2, 3, 3.1 and 3.2, and their kin whose differences are fields of ``ModelConfig``: Mistral, Qwen2, Qwen3, Phi-3.

Other families build their decoders from the parts here.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qkv_engine.kernels.linear import Addend, SteadyWeight, Weight, by_rows, linear_swiglu_for

from .attention import Attention, AttentionBatch
from .config import FULL, SLIDING, ModelConfig, read_biases, read_layer_types, read_num_layers
from .fields import Fields
from .layers import Embedding, Layer, LayerNorm, Linear, Norm, RMSNorm, RowParallelLinear, taken
from .ranks import ALONE, Part, Ranks
from .rope import LayerRotations, RopeConfig, Rotation


def read_llama(fields: Fields) -> ModelConfig:
    """Llama, whose biases are options."""
    return ModelConfig.read(
        fields,
        **read_biases(fields),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def read_mistral(fields: Fields) -> ModelConfig:
    """Mistral: all layers have the window, if there is one."""
    fields = fields.given(sliding_window=4096, num_key_value_heads=8)
    return ModelConfig.read(fields, layer_types=(SLIDING,) * read_num_layers(fields))


def read_qwen2(fields: Fields) -> ModelConfig:
    """Qwen2 and Qwen2.5: a bias on q, k and v; some layers may have a window."""
    return _read_qwen(fields, attention_bias=True)


def read_qwen3(fields: Fields) -> ModelConfig:
    """Qwen3: a norm over each head of q and k."""
    return _read_qwen(fields.given(head_dim=128), **read_biases(fields), qk_norm=True)


def _read_qwen(fields: Fields, **differences: Any) -> ModelConfig:
    fields = fields.given(sliding_window=4096)
    has_window = fields.boolean("use_sliding_window", default=False)
    first = fields.integer("max_window_layers", 0, 2**20, default=28)
    kinds = read_layer_types(fields, lambda layer: has_window and layer >= first)
    if SLIDING in kinds and not has_window:
        raise fields.error("layer_types", "contradicts use_sliding_window", f"Supported without it: {FULL}")
    return ModelConfig.read(fields, layer_types=kinds, **differences)


def read_phi3(fields: Fields) -> ModelConfig:
    """Phi-3 and Phi-4: q, k and v are one checkpoint tensor, and so are gate and up; a part of each head may rotate."""
    fields = fields.given(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    scaling = fields.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") in ("su", "yarn"):  # early names of longrope in this family
        fields = Fields({**fields.values, "rope_scaling": {**scaling, "type": "longrope"}})
    return ModelConfig.read(
        fields,
        layer_types=(SLIDING,) * read_num_layers(fields),
        rope=RopeConfig.from_hf(fields, may_be_partial=True),
        fused_qkv=True,
        fused_gate_up=True,
    )


def read_seed_oss(fields: Fields) -> ModelConfig:
    """Seed-OSS: a bias on q, k and v, and options for one on the output projection and the MLP."""
    fields = fields.given(num_key_value_heads=8, head_dim=128)
    return ModelConfig.read(
        fields,
        attention_bias=fields.boolean("attention_bias", default=True),
        attention_output_bias=fields.boolean("attention_out_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


class MLP(Layer):
    """Gated MLP: ``down(activation(gate(x)) * up(x))``. Each of ``ranks`` has its part of the inner features."""

    fused_name, down_name = "gate_up_proj", "down_proj"

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE):
        super().__init__()
        hidden, inner = config.hidden_size, ranks.part(config.intermediate_size)
        shards, fused_name = {"gate_proj": inner, "up_proj": inner}, self.fused_name if config.fused_gate_up else None
        self.gate_up_proj = Linear(hidden, shards, bias=config.mlp_bias, fused_name=fused_name)
        self.down_proj = RowParallelLinear(inner, {self.down_name: hidden}, ranks, bias=config.mlp_bias)
        self._is_silu = config.activation == "silu"

    @property
    def reader(self) -> Weight | None:
        """See ``Layer.reader``."""
        weight: Weight = self.gate_up_proj.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """x and result [N, E]."""
        out: Tensor = self.down_proj(self.inner(x))
        return out

    def sums(self, x: Tensor) -> Addend:
        """See ``Layer.sums``."""
        return self.down_proj.sums(self.inner(x))

    def inner(self, x: Tensor) -> Any:
        """The inner features, which the last projection reads: x [N, E] -> [N, I]."""
        if self._is_silu:
            return linear_swiglu_for(self.down_proj.weight, x, self.gate_up_proj.weight, self.gate_up_proj.bias)
        gate_up, is_steady = self.gate_up_proj(x), isinstance(self.gate_up_proj.weight, SteadyWeight)
        return by_rows(_gelu_gated, gate_up) if is_steady else _gelu_gated(gate_up)


def _gelu_gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def make_norm(config: ModelConfig, name: str) -> Norm:
    """The norm over hidden states whose weight the checkpoint calls ``name``."""
    if config.layer_norm:
        return LayerNorm(name, config.hidden_size, config.norm_eps)
    return RMSNorm(name, config.hidden_size, config.norm_eps, config.norm_offset)


class DecoderLayer(Layer):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    attention_class: type[Attention] = Attention
    mlp_class: type[Any] = MLP

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        self.input_layernorm = make_norm(config, "input_layernorm")
        self.self_attn = self.attention_class(config, layer, ranks)
        self.post_attention_layernorm = make_norm(config, "post_attention_layernorm")
        self.mlp = self.mlp_class(config, ranks)

    def forward(
        self,
        x: Addend,
        residual: Tensor | None,
        rotation: Rotation,
        batch: AttentionBatch,
        rows: Tensor | None = None,
    ) -> tuple[Addend, Tensor]:
        """x [N, E], the addend of ``residual`` (``None``: x is the embedding) -> the same pair for the next layer.

        With ``rows`` [M] the pair is that of these tokens alone, [M, E]: behind attention only they are computed.
        The residual is added right before the norm that reads it, which is one kernel on a GPU and adds up splits, too.
        """
        normed, residual = self.input_layernorm(x, residual, self.self_attn.reader)
        attended = self.self_attn.sums(normed, rotation, batch, rows)
        normed, residual = self.post_attention_layernorm(attended, taken(residual, rows), self.mlp.reader)
        return self.mlp.sums(normed), residual


class LlamaModel(Layer):
    """Embedding, decoder layers of one class and final norm."""

    def __init__(self, config: ModelConfig, layer_class: type[Layer], ranks: Ranks = ALONE):
        super().__init__()
        multiplier = config.embedding_multiplier
        self.embed_tokens = Embedding("embed_tokens", config.vocab_size, config.hidden_size, multiplier)
        self.layers = nn.ModuleList(layer_class(config, layer, ranks) for layer in range(len(config.ropes)))
        self.norm = make_norm(config, "norm")
        self.rotary_emb = LayerRotations(config.ropes, config.head_dims)

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None = None
    ) -> Tensor:
        rotations = self.rotary_emb(positions)
        x, residual = self.embed_tokens(input_ids), None
        for layer, rotation, own in zip(self.layers, rotations, self.rows_by_layer(rows), strict=True):
            x, residual = layer(x, residual, rotation, batch, own)
        out: Tensor = self.norm(x, residual)[0]
        return out

    def rows_by_layer(self, rows: Tensor | None) -> list[Tensor | None]:
        """The tokens whose states each layer gives: the last one those of ``rows``, the others all."""
        return [*(None for _ in self.layers[1:]), rows]


class LlamaForCausalLM(Layer):
    """A decoder with its output embedding. The loader builds, fills and packs it; it holds no KV.

    Each of ``ranks`` computes all hidden states and all logits; it has a part of the output embedding where that is a
    matrix of its own with a number of rows that the ranks divide. A family with another layer names it in
    ``layer_class``, one with another order of them in ``model_class``.
    """

    layer_class: type[Layer] = DecoderLayer
    model_class: type[LlamaModel] = LlamaModel
    draft_prefix: str | None = None  # of checkpoint tensors of layers that predict further tokens, which are skipped

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE):
        super().__init__()
        self.config, self.ranks = config, ranks
        self.model = self.model_class(config, self.layer_class, ranks)
        vocab = Part.all(config.vocab_size)
        self.splits_vocab = ranks.size > 1 and not config.tie_word_embeddings and config.vocab_size % ranks.size == 0
        if self.splits_vocab:
            vocab = ranks.part(config.vocab_size)
        self.lm_head = Linear(config.hidden_size, {"lm_head": vocab}, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states ``[M, E]`` of the tokens ``rows`` after the final norm, ``[N, E]`` of all without.

        input_ids and positions ``[N]`` int64: the step's tokens, requests one after another, and each token's position
        in its own request. ``batch`` holds the requests' keys and values. rows ``[M]`` int64: places of tokens among
        the step's, in any order; the last layer computes only them behind its attention.
        """
        hidden: Tensor = self.model(input_ids, positions, batch, rows)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden ``[M, E]`` -> logits ``[M, V]``, in the model's dtype."""
        logits: Tensor = self.lm_head(hidden)
        if self.splits_vocab:
            logits = self.ranks.gather(logits)
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        softcap = self.config.logit_softcap
        return logits if softcap is None else (logits / softcap).tanh_() * softcap

    def adapt(self, names: Set[str]) -> None:
        """Chooses among forms of a checkpoint by the ``names`` of its tensors; called before they are compared."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have the tensor ``name``, which the model has no use for."""
        return name.endswith(".rotary_emb.inv_freq")  # old releases of transformers wrote it; computed from the config
