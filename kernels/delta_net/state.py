"""The state of a request in one gated delta-net layer: its shapes, and their place in a slot of bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import FLOAT32, StateFormat, Stored

STATE_ALIGN = 128  # bytes: scales and the convolution's part of a slot begin on a cache line


class StateSpec(NamedTuple):
    """Heads and sizes of a gated delta-net layer, and the ``format`` in which its recurrent state is stored.

    ``num_v_heads`` is a multiple of ``num_k_heads``, as in GQA. ``narrower``: formats that states may step down to,
    widest first; bytes are those of ``format``, and of ``forms`` those of each.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    format: StateFormat = FLOAT32
    narrower: tuple[StateFormat, ...] = ()

    @property
    def forms(self) -> tuple[StateSpec, ...]:
        """The same in each of its formats alone, widest first."""
        return tuple(self._replace(format=fmt, narrower=()) for fmt in (self.format, *self.narrower))

    @property
    def num_channels(self) -> int:
        """Channels of the short convolution: q and k of the key heads, then v of the value heads."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state."""
        return self.num_v_heads, self.k_dim, self.v_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the convolution's state: the last inputs of each channel, the oldest first, in the model's dtype."""
        return self.num_channels, self.conv_width - 1

    @property
    def scales_offset(self) -> int:
        """Bytes of a slot before the scales [HV, DV], if the format has some."""
        return _aligned(self.format.dtype.itemsize * self.num_v_heads * self.k_dim * self.v_dim)

    @property
    def conv_offset(self) -> int:
        """Bytes of a slot before the convolution's state."""
        return self.scales_offset + _aligned(4 * self.num_v_heads * self.v_dim * self.format.has_scales)

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


class StateViews(NamedTuple):
    """A state as views of its slot: the recurrent one [HV, DK, DV] as it is stored, and ``conv`` [C, W - 1]."""

    recurrent: Stored
    conv: Tensor

    @classmethod
    def of(cls, slot: Tensor, spec: StateSpec, dtype: torch.dtype) -> StateViews:
        """Those of ``slot`` [bytes] uint8, for a model that computes in ``dtype``."""
        shape, scales = spec.recurrent_shape, None
        elements = _shaped(slot[: spec.scales_offset].view(spec.format.dtype), shape)
        if spec.format.has_scales:
            scales = _shaped(slot[spec.scales_offset : spec.conv_offset].view(torch.float32), (shape[0], shape[2]))
        return cls(Stored(elements, scales), _shaped(slot[spec.conv_offset :].view(dtype), spec.conv_shape))

    def parts(self) -> list[Tensor]:
        """All views."""
        return [x for x in (*self.recurrent, self.conv) if x is not None]


class DeltaWeights(NamedTuple):
    """What a layer computes with: ``conv`` [C, W], and of each value head ``decay`` and ``dt_bias`` [HV] float32.

    ``decay`` is exp(A_log). ``norm`` [DV] and ``eps`` are those of the gated norm of each value head's output.
    """

    spec: StateSpec
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


def _aligned(nbytes: int) -> int:
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of ``x``, behind which there is padding."""
    return x[: torch.Size(shape).numel()].view(shape)
