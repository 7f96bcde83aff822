"""The gate of a SwiGLU MLP."""

from __future__ import annotations

from torch import Tensor

from . import reference


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, the silu rounded to the dtype before the product.

    Shapes:  gate_up [N, 2 I], gate then up, contiguous on a GPU;  returns [N, I] in its dtype
    """
    if gate_up.is_cuda and not gate_up.requires_grad:
        from .triton import swiglu_triton

        return swiglu_triton(gate_up)
    return reference.swiglu(gate_up)


__all__ = ["swiglu"]
