"""Records of a mixture of experts: what a router gives, and the weights of a layer's experts."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear import Float4Weight, Float8Weight, IntegerWeight, PackedCodes, dequantize, pack_weight


class SoftmaxOver(Enum):
    """The logits over which a router's softmax runs."""

    ALL = auto()  # weights of the chosen experts sum to less than 1: OLMoE, Qwen3-MoE without norm_topk_prob
    CHOSEN = auto()  # also all of them with the chosen renormalised: Mixtral, Granite-MoE, Qwen3-MoE, gpt-oss


class Routing(NamedTuple):
    """The experts of each token, best first, and their weights.

    Shapes:  experts [N, K] int32, distinct in a row;  weights [N, K] float32
    """

    experts: Tensor
    weights: Tensor


class SwiGLU(NamedTuple):
    """The gated activation ``gate sigmoid(alpha gate) (up + shift)``, gate and up clamped by ``limit``.

    The gate's part is rounded to the dtype before the product. gpt-oss has alpha 1.702, limit 7 and shift 1.
    """

    alpha: float = 1.0
    limit: float | None = None  # gate from above, up from both sides
    shift: float = 0.0


class CodedExperts(NamedTuple):
    """Quantized matrices [X, O, I] of ``num_experts``: one weight [X O, I] of all their rows."""

    weight: IntegerWeight | Float8Weight | Float4Weight | PackedCodes
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, and rows and columns of each, ``(X, O, I)``."""
        rows, columns = self.weight.shape
        return self.num_experts, rows // self.num_experts, columns

    def pack(self) -> CodedExperts:
        """In the layout that kernels read."""
        packed = pack_weight(self.weight)
        assert isinstance(packed, PackedCodes | IntegerWeight | Float8Weight | Float4Weight)
        return self._replace(weight=packed)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The plain matrices."""
        return dequantize(self.weight, dtype).view(self.shape)


class Experts(NamedTuple):
    """The weights of a layer's experts, stacked; a tensor-parallel rank has some of the inner features.

    Shapes:  gate_up [X, 2 I, E], gate's rows then up's;  down [X, E, I];  gate_up_bias [X, 2 I];  down_bias [X, E]
    """

    gate_up: Tensor | CodedExperts
    down: Tensor | CodedExperts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None  # of one rank alone: ranks' results are summed
    activation: SwiGLU = SwiGLU()

    @property
    def num_experts(self) -> int:
        """Experts of the layer, X."""
        return self.down.shape[0]

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``gate_up`` and ``down`` as plain matrices; those that are stay as they are."""
        gate_up, down = (each if isinstance(each, Tensor) else each.dequantize(dtype) for each in self[:2])
        return gate_up, down
