"""The KV of a model's layers: KV heads, their size, and the window of tokens that a token sees. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig


MAX_GROUPS = 2  # of layers with equal KV; each more multiplies the steps that are captured


class LayerKV(NamedTuple):
    """The KV of a layer; layers with equal ones form a group. ``window``: tokens that a token sees, None for all."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None


def kv_of_layers(model: ModelConfig, max_model_len: int | None = None) -> list[LayerKV]:
    """What the KV of each layer is. A window that no request outgrows counts as none.

    No request is longer than ``max_model_len``, by default the model's context.
    """
    most = max_model_len or model.max_position_embeddings
    windows = [spec.window if spec.window is not None and spec.window < most else None for spec in model.attention]
    return [
        LayerKV(spec.num_kv_heads, spec.head_dim, window) for spec, window in zip(model.attention, windows, strict=True)
    ]
