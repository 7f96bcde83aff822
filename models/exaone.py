"""EXAONE 4: norms after attention and MLP; beside layers with a window, those without do not rotate."""

from __future__ import annotations

from .config import SLIDING, ModelConfig, read_full_every, read_window_pattern
from .decoder_layers import PostNormLayer
from .fields import Fields
from .llama import LlamaForCausalLM
from .rope import NO_ROTATION, RopeConfig


def read_exaone4(fields: Fields) -> ModelConfig:
    """EXAONE 4: a norm over each head of q and k."""
    fields = fields.given(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    rope, has_window = RopeConfig.from_hf(fields), fields.get("sliding_window") is not None
    pattern = 1
    if has_window and fields.get("layer_types") is None:
        pattern = read_window_pattern(fields, default=4)
    kinds = read_full_every(fields, pattern)
    ropes = [rope if kind == SLIDING or not has_window else NO_ROTATION for kind in kinds]
    return ModelConfig.read(fields, layer_types=kinds, ropes=ropes, qk_norm=True)


class Exaone4ForCausalLM(LlamaForCausalLM):
    """EXAONE 4."""

    layer_class = PostNormLayer
