"""Model configuration: what all families read alike from ``config.json``; each family's file reads its differences.

Checks everything it reads; it opens no file and builds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qkv_engine.errors import ConfigError, ModelError
from qkv_engine.kernels.delta_net import StateSpec

from .attention_spec import AttentionSpec
from .fields import Fields
from .rope import RopeConfig
from .weights.scheme import UNQUANTIZED, Scheme

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# Kinds of layers, by their names in ``layer_types``.
FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Limits far above every released dense model: a hostile config cannot ask for absurd shapes.
_MAX_LAYERS = 512
_MAX_WIDTH = 2**20
_MAX_VOCAB = 2**24
_MAX_HEADS = 1024
_MAX_POSITIONS = 2**31


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer. Sizes in elements, contexts in tokens.

    ``attention`` and ``ropes`` have an entry a layer, ``states`` one for each layer that has a state in place of KV.
    ``max_context`` is the longest context the model was made for.
    ``attention_bias`` is the bias of q, k and v, ``attention_output_bias`` that of the output projection;
    ``qk_norm`` is a norm over each head of q and k. ``norm_offset`` is added to the checkpoint's norm weights;
    ``layer_norm`` stands for LayerNorm without bias in place of RMSNorm. ``fused_qkv`` and ``fused_gate_up``: these
    projections are one checkpoint tensor. ``dtype`` is the checkpoint's. ``is_nested``: the checkpoint has parts
    beside the decoder, such as a vision tower. ``weights`` has the format of each linear layer.
    """

    architecture: str = ""  # the name in the registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionSpec, ...]
    ropes: tuple[RopeConfig, ...]
    norm_eps: float
    max_position_embeddings: int
    max_context: int
    states: tuple[StateSpec, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    layer_norm: bool = False
    activation: str = "silu"
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    is_nested: bool = False
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    weights: Scheme = UNQUANTIZED

    @classmethod
    def read(
        cls,
        fields: Fields,
        *,
        layer_types: Sequence[str] | None = None,
        rope: RopeConfig | None = None,
        ropes: Sequence[RopeConfig] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        activation_field: str = "hidden_act",
        **differences: Any,
    ) -> ModelConfig:
        """Reads a decoder's fields. An option that is given stands in place of the field, or of what Llama has there.

        ``layer_types`` are those of ``read_layer_types``; ``rope`` is that of all layers, ``ropes`` has one a layer.
        ``scale`` and ``softcap`` are those of ``AttentionSpec``, ``activation_field`` names that of the MLP's
        activation, ``differences`` are fields of this class.
        Raises ``ModelError`` naming the field that is missing, malformed or out of range.
        """
        num_heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
        hidden_size = fields.integer("hidden_size", 1, _MAX_WIDTH)
        vocab_size = fields.integer("vocab_size", 1, _MAX_VOCAB)
        head_dim = read_head_dim(fields)
        positions = fields.integer("max_position_embeddings", 1, _MAX_POSITIONS)
        bos_token_ids = fields.token_ids("bos_token_id", vocab_size)
        kinds = (FULL,) * read_num_layers(fields) if layer_types is None else layer_types
        if ropes is None:
            ropes = (rope or RopeConfig.from_hf(fields),) * len(kinds)
        facts: dict[str, Any] = {
            "intermediate_size": fields.integer("intermediate_size", 1, _MAX_WIDTH),
            "norm_eps": fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
            "max_context": max(each.stretched(positions) for each in ropes),
            "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
            "activation": fields.choice(activation_field, _ACTIVATIONS, "silu", "this activation is not supported"),
            "dtype": _dtype(fields),
            "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
            "bos_token_id": bos_token_ids[0] if bos_token_ids else None,
        } | differences
        for each in set(ropes):
            each.check(fields, head_dim)
        spec = AttentionSpec(
            num_heads, _num_kv_heads(fields, num_heads), head_dim, scale or head_dim**-0.5, softcap=softcap
        )
        window = _window(fields, facts["max_context"]) if SLIDING in kinds else None
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            max_position_embeddings=positions,
            attention=tuple(spec._replace(window=window if kind == SLIDING else None) for kind in kinds),
            ropes=tuple(ropes),
            **facts,
        )

    @property
    def last_attention(self) -> int | None:
        """The entry of ``attention`` that is the last layer's and no other's."""
        return len(self.attention) - 1

    @property
    def num_layers(self) -> int:
        """Layers with KV of their own."""
        return len(self.attention)

    @property
    def num_heads(self) -> int:
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention[0].head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Channels of a head, layer by layer."""
        return tuple(spec.head_dim for spec in self.attention)

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """Inner features of each kind of MLP."""
        return (self.intermediate_size,)

    def for_context(self, num_tokens: int) -> ModelConfig:
        """The same model, its rotations those for requests of up to ``num_tokens``."""
        return replace(self, ropes=tuple(rope.for_context(num_tokens) for rope in self.ropes))

    def check_ranks(self, size: int) -> None:
        """Raises ``ConfigError`` unless heads and inner features can be split over ``size`` tensor-parallel ranks."""
        problem = None
        inner = (("inner features", size) for size in self.inner_sizes)
        for name, number in (("attention heads", self.num_heads), *inner):
            if number % size:
                problem = f"the model's {number} {name} cannot be split evenly"
        for num_k_heads in {spec.num_k_heads for spec in self.states}:
            if num_k_heads % size:
                problem = f"the model's {num_k_heads} key heads of states cannot be split evenly"
        for num_kv_heads in {spec.num_kv_heads for spec in self.attention}:
            if num_kv_heads % size and size % num_kv_heads:
                problem = f"the model's {num_kv_heads} KV heads can be neither split nor repeated evenly"
        if problem is not None:
            remedy = "Use a number of ranks that divides the model's heads, such as 2"
            raise ConfigError(problem, field="tensor_parallel", value=size, remedy=remedy)

    def share(self, size: int) -> ModelConfig:
        """The shape of one of ``size`` ranks' part of the layers. Raises ``ConfigError``, as ``check_ranks`` does."""
        self.check_ranks(size)
        specs = (
            spec._replace(num_heads=spec.num_heads // size, num_kv_heads=max(1, spec.num_kv_heads // size))
            for spec in self.attention
        )
        states = tuple(spec.share(size) for spec in self.states)
        inner = self.intermediate_size // size
        return replace(self, attention=tuple(specs), states=states, intermediate_size=inner)


def read_num_layers(fields: Fields) -> int:
    """The number of decoder layers."""
    return fields.integer("num_hidden_layers", 1, _MAX_LAYERS)


def read_layer_types(fields: Fields, is_sliding: Callable[[int], object]) -> tuple[str, ...]:
    """The kind of each layer, ``FULL`` or ``SLIDING``; where ``layer_types`` is left out, as ``is_sliding`` says."""
    num_layers = read_num_layers(fields)
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(SLIDING if is_sliding(layer) else FULL for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        message = f"must be a list of {num_layers} supported layer types"
        raise fields.error("layer_types", message, f"Supported: {FULL}, {SLIDING}")
    return tuple(kinds)


def read_full_every(fields: Fields, period: int) -> tuple[str, ...]:
    """The same; by default all layers have a window but each ``period``-th."""
    return read_layer_types(fields, lambda layer: (layer + 1) % period)


def read_window_pattern(fields: Fields, default: int) -> int:
    """``sliding_window_pattern``, the period of layers without a window."""
    return fields.integer("sliding_window_pattern", 1, 2**20, default=default)


def read_head_dim(fields: Fields) -> int:
    """Channels of a head."""
    num_heads, hidden_size = (fields.integer(name, 1, _MAX_WIDTH) for name in ("num_attention_heads", "hidden_size"))
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("head_dim", f"is required: {num_heads} heads do not divide hidden_size {hidden_size}")
    head_dim = fields.integer("head_dim", 2, 512, default=hidden_size // num_heads)
    if head_dim % 2 or not 2 <= head_dim <= 512:
        raise ModelError("must be an even number from 2 to 512", field="head_dim", value=head_dim)
    return head_dim


def read_biases(fields: Fields) -> dict[str, Any]:
    """The option for a bias on q, k and v and on the output projection, off where it is left out."""
    bias = fields.boolean("attention_bias", default=False)
    return {"attention_bias": bias, "attention_output_bias": bias}


def read_multiplier(fields: Fields, name: str) -> float:
    """A positive factor, 1 where it is left out."""
    return fields.number(name, 1e-6, 1e6, default=1.0)


def read_softcap(fields: Fields, name: str) -> float | None:
    """A soft cap of logits, ``None`` where the field is null."""
    return None if fields.get(name) is None else fields.number(name, 1e-3, 1e6)


def _window(fields: Fields, max_context: int) -> int | None:
    """Tokens that a token sees in a sliding layer, itself included; ``None`` if that is all it ever has before it."""
    if fields.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window", 1, _MAX_POSITIONS)
    return window if window < max_context else None


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _dtype(fields: Fields) -> torch.dtype:
    name = "torch_dtype" if fields.get("dtype") is None else "dtype"
    dtype = DTYPES.get(fields.string(name, default="float32").removeprefix("torch."))
    if dtype is None:
        raise fields.error(name, "this dtype is not supported", "Supported: float32, bfloat16, float16")
    return dtype
