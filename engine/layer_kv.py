"""The KV of a model's layers: KV heads, their size, the window of tokens that a token sees; and states. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig


WINDOW_BITS = 8  # the fewest of a rung on which blocks of layers with a window stand by default
MAX_GROUPS = 2  # of layers with equal KV; each more multiplies the steps that are captured


class LayerKV(NamedTuple):
    """The KV of a layer; layers with equal ones form a group. ``window``: tokens that a token sees, None for all."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def least_bits(self, bits: int) -> int:
        """The fewest bits of codes on a ladder that allows ``bits``, and has no narrow rungs for windows."""
        return bits if self.window is None else max(bits, WINDOW_BITS)


class LayerState(NamedTuple):
    """The heads and sizes of the state that a layer without KV keeps, as ``StateSpec`` of ``kernels.delta_net``."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int


def kv_of_layers(model: ModelConfig, max_model_len: int | None = None) -> list[LayerKV]:
    """What the KV of each layer is. A window that no request outgrows counts as none.

    No request is longer than ``max_model_len``, by default the model's context.
    """
    most = max_model_len or model.max_position_embeddings
    windows = [spec.window if spec.window is not None and spec.window < most else None for spec in model.attention]
    return [
        LayerKV(spec.num_kv_heads, spec.head_dim, window) for spec, window in zip(model.attention, windows, strict=True)
    ]
