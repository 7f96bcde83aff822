"""Demotion of codes, plainly: one equivalent right shift at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout, UniformSide
from ..pages import read_codes, read_meta, write_side


def shrink(codes: Tensor, from_bits: int, to_bits: int) -> Tensor:
    """X_b = ((2^2b - 2^b + 1) (X_2b + 2^(b-1))) >> 3b, from ``from_bits`` down to ``to_bits`` by halves.

    That is X_2b / (2^b + 1) to the nearest integer; ties cannot occur, the divisor being odd. Exact for every code.
    Shapes:  codes [...] of any integer type that holds 16 bits unsigned;  returns [...] of the same type
    Source:  PM-KVQ (arXiv 2505.18610), equivalent right shift
    """
    bits = from_bits
    while bits > to_bits:
        bits //= 2
        codes = ((1 << 2 * bits) - (1 << bits) + 1) * (codes + (1 << bits - 1)) >> 3 * bits
    return codes


def demote_reference(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """The same as ``demote``, one page side at a time."""
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        for i, (old, new) in enumerate(zip(source.sides, target.sides, strict=True)):
            if not (isinstance(old, UniformSide) and isinstance(new, UniformSide)):
                continue
            first = a + source.offsets[i]
            rows = memory[first : first + old.nbytes].unsqueeze(0)
            codes = shrink(read_codes(rows, old).int(), old.bits, new.bits).to(torch.uint8)
            out = write_side(codes, read_meta(rows, old), new)[0]
            first = b + target.offsets[i]
            memory[first : first + len(out)] = out
