"""SmolLM3: some layers do not rotate."""

from __future__ import annotations

from .config import FULL, SLIDING, ModelConfig, read_biases, read_layer_types, read_num_layers
from .fields import Fields
from .rope import NO_ROTATION, RopeConfig


def read_smollm3(fields: Fields) -> ModelConfig:
    """SmolLM3: by default every fourth layer does not rotate, and has the window if there is one."""
    fields = fields.given(num_key_value_heads=4, rope_theta=2_000_000.0, tie_word_embeddings=True)
    rotates = _rotating_layers(fields)
    has_window = fields.boolean("use_sliding_window", default=False) and fields.get("sliding_window") is not None
    kinds = read_layer_types(fields, lambda layer: has_window and not rotates[layer])
    if SLIDING in kinds and not has_window:
        raise fields.error("layer_types", "contradicts use_sliding_window", f"Supported without it: {FULL}")
    rope = RopeConfig.from_hf(fields)
    return ModelConfig.read(
        fields,
        layer_types=kinds,
        ropes=[rope if rotates[layer] else NO_ROTATION for layer in range(len(kinds))],
        **read_biases(fields),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def _rotating_layers(fields: Fields) -> list[int]:
    """``no_rope_layers``: 1 for a layer that rotates, 0 for one that does not."""
    num_layers = read_num_layers(fields)
    layers = fields.get("no_rope_layers")
    if layers is None:
        interval = fields.integer("no_rope_layer_interval", 1, 2**20, default=4)
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(layers, list) or len(layers) < num_layers or any(rotates not in (0, 1) for rotates in layers):
        raise fields.error("no_rope_layers", f"must be a list of 0 or 1 for each of {num_layers} layers")
    return layers
