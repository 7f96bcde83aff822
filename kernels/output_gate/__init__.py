"""The gate of an attention's output."""

from __future__ import annotations

from torch import Tensor


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``, the sigmoid rounded to the dtype before the product.

    Shapes:  x, gate, result [N, C], one dtype, contiguous on a GPU
    """
    if x.is_cuda and not (x.requires_grad or gate.requires_grad):
        from .triton import output_gate_triton

        return output_gate_triton(x, gate)
    return x * gate.sigmoid()


__all__ = ["output_gate"]
