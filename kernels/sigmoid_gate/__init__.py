"""The gate of an attention's output."""

from __future__ import annotations

from torch import Tensor


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x sigmoid(gate)``, the sigmoid rounded to the dtype before the product.

    Shapes:  x, gate and result [N, I] in one dtype; on a GPU x is contiguous, and so are rows of the gate
    On a GPU the gate is read while the kernel before may still run: that kernel must not write it.
    """
    if x.is_cuda and not (x.requires_grad or gate.requires_grad):
        from .triton import sigmoid_gate_triton

        return sigmoid_gate_triton(x, gate)
    return x * gate.sigmoid()


__all__ = ["sigmoid_gate"]
