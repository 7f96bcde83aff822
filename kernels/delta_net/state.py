"""The state of a request in one gated delta-net layer: its shapes, and their place in a slot of bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STATE_ALIGN = 128  # bytes: the convolution's part of a slot begins on a cache line


class StateSpec(NamedTuple):
    """Heads and sizes of a gated delta-net layer. ``num_v_heads`` is a multiple of ``num_k_heads``, as in GQA."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int

    @property
    def num_channels(self) -> int:
        """Channels of the short convolution: q and k of the key heads, then v of the value heads."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state, float32."""
        return self.num_v_heads, self.k_dim, self.v_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the convolution's state: the last inputs of each channel, the oldest first, in the model's dtype."""
        return self.num_channels, self.conv_width - 1

    @property
    def conv_offset(self) -> int:
        """Bytes of a slot before the convolution's state."""
        return _aligned(4 * self.num_v_heads * self.k_dim * self.v_dim)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of a slot for a model that computes in ``dtype``."""
        return self.conv_offset + _aligned(self.num_channels * (self.conv_width - 1) * dtype.itemsize)

    def share(self, size: int) -> StateSpec:
        """The heads of one of ``size`` ranks."""
        return self._replace(num_k_heads=self.num_k_heads // size, num_v_heads=self.num_v_heads // size)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels [N, C] as q and k [N, HK, DK] and v [N, HV, DV]."""
        keys = self.num_k_heads * self.k_dim
        q, k, v = x.split((keys, keys, self.num_v_heads * self.v_dim), dim=-1)
        return q.unflatten(-1, (-1, self.k_dim)), k.unflatten(-1, (-1, self.k_dim)), v.unflatten(-1, (-1, self.v_dim))


class DeltaWeights(NamedTuple):
    """What a layer computes with: ``conv`` [C, W], and of each value head ``decay`` and ``dt_bias`` [HV] float32.

    ``decay`` is exp(A_log).
    """

    spec: StateSpec
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor


def _aligned(nbytes: int) -> int:
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN
