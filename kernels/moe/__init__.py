"""Mixture of experts: a router's choice, and the chosen experts' gated MLPs.

Each layer calls ``route`` with the router's logits and ``experts_mlp`` with what it gives. Shapes depend on the number
of tokens alone, so that a graph can capture both. A shared expert is a dense MLP beside them.
"""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference
from .experts import CodedExperts, Experts, Routing, SoftmaxOver, SwiGLU


def route(logits: Tensor, top_k: int, over: SoftmaxOver) -> Routing:
    """The ``top_k`` experts with the largest logits, best first, and their softmax in float32.

    Of equal logits the lower expert comes first. A NaN counts as the largest: experts are distinct and exist even then.

    Shapes:  logits [N, X], contiguous on a GPU, top_k <= X
    """
    if logits.is_cuda and not logits.requires_grad:
        from .triton import route_triton

        return route_triton(logits, top_k, over)
    return reference.route(logits, top_k, over)


def experts_mlp(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """The weighted sum of each token's experts: ``sum_k w_k down_k(activation(gate_up_k(x)))``.

    Products and activation round to the dtype, the sum runs in float32 in the order of k and rounds once. On a GPU a
    row has the same bits whichever rows are beside it, for one number of rows.

    Shapes:  x [N, E];  returns [N, E]; one dtype with the weights, everything contiguous on a GPU
    """
    if x.is_cuda and not x.requires_grad:
        from .codes import can_multiply, experts_mlp_codes
        from .triton import experts_mlp_triton

        product = experts_mlp_codes if can_multiply(x, experts) else experts_mlp_triton
        return product(x, routing, experts)
    return cpu.experts_mlp(x, routing, experts)


__all__ = ["CodedExperts", "Experts", "Routing", "SoftmaxOver", "SwiGLU", "experts_mlp", "route"]
