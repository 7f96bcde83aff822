"""Hadamard alone: keys and values rotated over their channels, then minimum and range of each token. No data is seen.

Source:  QuaRot (arXiv 2404.00456), as OSCAR (FutureMLS-Lab/OSCAR, README.md) measures it at 2 bits: one Hadamard matrix
for all layers and heads, per token, nothing clipped.
Assumed:  groups are whole heads; step and minimum are fp16; no random signs. For heads of 80 or 96 channels the matrix
is of Paley's kind (orders 20 and 12), as QuaRot takes one of a table there; OSCAR's scripts take powers of two alone.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import quantizers
from .cache import LayerCache, Side, Simulate, by_token

META_BITS = 16  # of a step, a minimum or a scale


@cache
def hadamard(size: int) -> Tensor:
    """An orthonormal Hadamard matrix ``[size, size]`` float32: Sylvester's doublings of 1 or of one of Paley's.

    Raises ``ValueError`` for a size that has neither.
    """
    bases = [base for i in reversed(range(size.bit_length())) if (base := size >> i) << i == size and _is_base(base)]
    if not bases:
        raise ValueError(f"no Hadamard matrix of {size} channels is built here")
    found = paley(bases[0]) if bases[0] > 1 else torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    found /= size**0.5
    return found


def paley(order: int) -> Tensor:
    """The Hadamard matrix ``[order, order]`` of +1 and -1 whose ``order`` is a prime p = 3 mod 4 plus one.

    I + S with a border of S: +1 above, -1 beside, and S[i, j] = 1 where i - j is a square modulo p, -1 elsewhere.
    """
    prime = order - 1
    squares = {i * i % prime for i in range(1, prime)}
    found = torch.eye(order)
    found[0, 1:], found[1:, 0] = 1, -1
    for i in range(prime):
        for j in (j for j in range(prime) if j != i):
            found[1 + i, 1 + j] = 1 if (i - j) % prime in squares else -1
    return found


def _is_base(order: int) -> bool:
    """Whether ``order`` is 1, or one that ``paley`` takes."""
    prime = order - 1
    return order == 1 or (prime % 4 == 3 and all(prime % i for i in range(2, prime)))


def rotated(simulate: Simulate, rotation: Tensor) -> Simulate:
    """``simulate`` of tokens times an orthonormal ``rotation``, [D, D] or [H, D, D], and back."""
    return lambda x: simulate(x @ rotation) @ rotation.mT


def simulate(bits: int) -> Simulate:
    """Keys or values ``[H, n, D]``, quantized and dequantized."""

    def of_heads(x: Tensor) -> Tensor:
        tokens = by_token(lambda groups: quantizers.kitty(groups, bits).values(), x.shape[2])
        return rotated(tokens, hadamard(x.shape[2]))(x)

    return of_heads


def element_bits(bits: int, head_dim: int) -> float:
    """Bits of an element of K or V: code, step and minimum of a token."""
    return bits + 2 * META_BITS / head_dim


def layer(bits: int) -> LayerCache:
    """A layer's cache, without windows: a token is quantized as soon as a step has attended it."""
    k, v = (Side(lambda full: full, simulate(bits)) for _ in range(2))
    return LayerCache(k, v)
