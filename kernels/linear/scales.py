"""Scales and zeros of groups of columns, as the loops of products read them.

They lie in words of 32 bits, the smallest that is copied ahead of its use. Shorter ones are loaded into registers, by
loads that return behind all copies asked for before them, so that each step waits for those of later ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .unpack import minus_zeros


@triton.jit
def load_groups(words_ptr, o_row, o_group, GROUPS: tl.constexpr, A_WORD: tl.constexpr):
    """Words of group ``o_group`` of rows ``o_row``, A_WORD groups each; GROUPS are a row."""
    return tl.load(words_ptr + o_row * (GROUPS // A_WORD) + o_group // A_WORD)


@triton.jit
def scale_of(b_words, o_group, DTYPE: tl.constexpr):
    """Float32 scales of group ``o_group``, in one column, from words of two of DTYPE, or from scales."""
    return tl.expand_dims(_scale_of(b_words, o_group, DTYPE), -1)


@triton.jit
def minus_of(b_words, o_group, DTYPE: tl.constexpr):
    """What ``unpack_4_bits`` adds in group ``o_group``, in one column, from words of four zeros, or from zeros."""
    b_zeros = b_words if b_words.dtype != tl.int32 else b_words >> (o_group % 4 * 8) & 255
    return tl.expand_dims(minus_zeros(b_zeros, DTYPE), -1)


@triton.jit
def _scale_of(b_words, o_group, DTYPE: tl.constexpr):
    if b_words.dtype != tl.int32:
        return b_words.to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        return (b_words >> (o_group % 2 * 16) << 16).to(tl.float32, bitcast=True)
    else:
        return (b_words >> (o_group % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zeros_after(b_scale, SHAPE: tl.constexpr):
    """Zeros of SHAPE that depend on scales: what a product begins with is copied ahead, as its operands are."""
    return tl.broadcast_to(b_scale * 0.0, SHAPE)
