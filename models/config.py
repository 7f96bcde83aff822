"""Model configuration from ``config.json``: the one place that knows Hugging Face's attribute names.

Checks everything it reads; it opens no file and builds no tensor.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from qkv_engine.errors import ConfigError, ModelError

from .attention_spec import AttentionSpec
from .fields import Fields
from .rope import RopeConfig

logger = logging.getLogger("qkv_engine")

# architecture -> model_type
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}

# Limits far above every released dense model: a hostile config cannot ask for absurd shapes.
_MAX_LAYERS = 512
_MAX_WIDTH = 2**20
_MAX_VOCAB = 2**24
_MAX_HEADS = 1024
_MAX_POSITIONS = 2**31
# transformers' defaults where a config leaves the field out.
_QWEN3_HEAD_DIM = 128
_MISTRAL_SLIDING_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer. Sizes in elements, ``max_position_embeddings`` in tokens.

    ``attention_bias`` is the bias of q, k and v, ``attention_output_bias`` that of the output projection;
    ``qk_norm`` is an RMSNorm over each head of q and k; ``dtype`` is the checkpoint's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_hf(cls, hf: object) -> ModelConfig:
        """Reads a parsed ``config.json``, in the form of transformers 5 or of earlier releases.

        Raises ``ModelError`` naming the field that is missing, malformed, out of range or not supported.
        """
        fields = Fields(hf)
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        _refuse_sliding_window(fields, architecture)
        num_heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
        hidden_size = fields.integer("hidden_size", 1, _MAX_WIDTH)
        vocab_size = fields.integer("vocab_size", 1, _MAX_VOCAB)
        bias = fields.boolean("attention_bias", default=False)
        honours_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        bos_token_ids = fields.token_ids("bos_token_id", vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 1, _MAX_WIDTH),
            num_layers=fields.integer("num_hidden_layers", 1, _MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads),
            head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
            rope=RopeConfig.from_hf(fields),
            max_position_embeddings=fields.integer("max_position_embeddings", 1, _MAX_POSITIONS),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            attention_bias=architecture == "Qwen2ForCausalLM" or (bias and honours_bias),
            attention_output_bias=bias and honours_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", default=False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=_dtype(fields),
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        )

    @property
    def max_context(self) -> int:
        """Tokens of the longest context the model was made for, stretched by its rope scaling where it has one."""
        rope, positions = self.rope, self.max_position_embeddings
        if rope.rope_type == "linear":  # its configs state the context before scaling
            return int(positions * rope.factor)
        if rope.rope_type == "yarn":
            return max(positions, int(rope.original_max_position_embeddings * rope.factor))
        return positions

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """What attention computes in each layer."""
        spec = AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)
        return (spec,) * self.num_layers

    def check_ranks(self, size: int) -> None:
        """Raises ``ConfigError`` unless heads and inner features can be split over ``size`` tensor-parallel ranks."""
        problem = None
        for name, number in (("attention heads", self.num_heads), ("inner features", self.intermediate_size)):
            if number % size:
                problem = f"the model's {number} {name} cannot be split evenly"
        if self.num_kv_heads % size and size % self.num_kv_heads:
            problem = f"the model's {self.num_kv_heads} KV heads can be neither split nor repeated evenly"
        if problem is not None:
            remedy = "Use a number of ranks that divides the model's heads, such as 2"
            raise ConfigError(problem, field="tensor_parallel", value=size, remedy=remedy)

    def share(self, size: int) -> ModelConfig:
        """The shape of one of ``size`` ranks' part of the layers. Raises ``ConfigError``, as ``check_ranks`` does."""
        self.check_ranks(size)
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all checkpoint tensors, a tied output embedding counted once."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        layer = hidden * (query + 2 * key) + query * hidden + 3 * hidden * inner + 2 * hidden
        layer += (query + 2 * key) * self.attention_bias + hidden * self.attention_output_bias
        layer += (2 * inner + hidden) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + hidden


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None:
        model_type = fields.string("model_type", default="")
        names = [name for name, kind in ARCHITECTURES.items() if kind == model_type] or [model_type]
    if not isinstance(names, list) or len(names) != 1 or type(names[0]) is not str:
        raise fields.error("architectures", "must be a list of one class name")
    architecture: str = names[0]
    supported = f"Supported: {', '.join(ARCHITECTURES)}"
    if architecture not in ARCHITECTURES:
        raise ModelError("not supported", field="architecture", value=architecture, remedy=supported)
    model_type = fields.string("model_type", default=ARCHITECTURES[architecture])
    if model_type != ARCHITECTURES[architecture]:
        raise fields.error("model_type", f"contradicts the architecture {architecture}", supported)
    return architecture


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            remedy = "Use the original float32, bfloat16 or float16 checkpoint"
            raise fields.error(name, "quantized weights are not supported", remedy)
    if fields.string("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", "this activation is not supported", "Supported: silu")
    if fields.get("auto_map") is not None:
        logger.warning("config.json names custom code (auto_map); it is ignored, built-in model code is used")


def _refuse_sliding_window(fields: Fields, architecture: str) -> None:
    """Raises ``ModelError`` for a sliding window, unless it covers the whole context."""
    max_positions = fields.integer("max_position_embeddings", 1, _MAX_POSITIONS)
    window = None
    if architecture == "MistralForCausalLM":
        # A missing key means transformers' default window; null means no window.
        window = fields.get("sliding_window") if "sliding_window" in fields.values else _MISTRAL_SLIDING_WINDOW
    elif architecture.startswith("Qwen") and fields.boolean("use_sliding_window", default=False):
        window = fields.get("sliding_window")
    if window is not None and (type(window) is not int or window < max_positions):
        remedy = f"Supported: null, or at least max_position_embeddings ({max_positions})"
        raise fields.error("sliding_window", f"sliding-window attention ({window!r:.40}) is not supported", remedy)
    layer_types = fields.get("layer_types")
    if layer_types is None or architecture == "LlamaForCausalLM":
        return
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise fields.error("layer_types", "a layer type is not supported", "Supported: full_attention")


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and architecture != "Qwen3ForCausalLM" and hidden_size % num_heads:
        raise fields.error("head_dim", f"is required: {num_heads} heads do not divide hidden_size {hidden_size}")
    derived = _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    head_dim = fields.integer("head_dim", 2, 512, default=derived)
    if head_dim % 2 or not 2 <= head_dim <= 512:
        raise ModelError("must be an even number from 2 to 512", field="head_dim", value=head_dim)
    return head_dim


def _dtype(fields: Fields) -> torch.dtype:
    name = "torch_dtype" if fields.get("dtype") is None else "dtype"
    dtype = DTYPES.get(fields.string(name, default="float32").removeprefix("torch."))
    if dtype is None:
        raise fields.error(name, "this dtype is not supported", "Supported: float32, bfloat16, float16")
    return dtype
