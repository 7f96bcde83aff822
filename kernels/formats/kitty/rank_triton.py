"""Device functions that rank a page's channels and choose those to boost. Scores equal the reference's bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import Ranking

VARIANCE = tl.constexpr(int(Ranking.VARIANCE))
RANDOM = tl.constexpr(int(Ranking.RANDOM))


@triton.jit
def choose_channels(b_codes, b_low, b_span, SIDE: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """1 for boosted channels, else 0: [TILE_D] int32. 4-bit codes [T, TILE_D] int32; (min, range) [TILE_D] fp16."""
    o_d = tl.arange(0, TILE_D)
    b_score = _scores(b_codes, b_low, b_span, o_d, SIDE.RANKING)
    b_score = tl.where(o_d < D, b_score, -1.0)
    is_ahead = b_score[None, :] > b_score[:, None]
    is_ahead |= (b_score[None, :] == b_score[:, None]) & (o_d[None, :] < o_d[:, None])
    return (tl.sum(is_ahead.to(tl.int32), 1) < SIDE.BOOSTED).to(tl.int32)


@triton.jit
def _scores(b_codes, b_low, b_span, o_d, RANKING: tl.constexpr):
    """See ``reference.channel_scores``. All products are exact in float32, so that only the last sum rounds."""
    if RANKING == RANDOM:
        b_score = _hash(b_low, b_span, o_d)
    elif RANKING == VARIANCE:
        b_sum = tl.sum(b_codes, 0)
        b_spread = b_codes.shape[0] * tl.sum(b_codes * b_codes, 0) - b_sum * b_sum
        b_span = b_span.to(tl.float32)
        b_score = b_span * b_span * b_spread.to(tl.float32)
    else:
        b_zero, b_span = b_low.to(tl.float32) * 15, b_span.to(tl.float32)
        o_code = tl.arange(0, 16).to(tl.float32)
        # The first code of a channel that stands for a value of at least 0.
        b_first = tl.sum((o_code[:, None] * b_span[None, :] + b_zero[None, :] < 0).to(tl.int32), 0)
        # One sum of +-1 and of +-codes, 16 bits apart.
        b_both = tl.sum(tl.where(b_codes >= b_first[None, :], b_codes + 65536, -65536 - b_codes), 0)
        b_count = (b_both + 32768) >> 16
        b_sum = b_both - (b_count << 16)
        b_score = b_zero * b_count.to(tl.float32) + b_span * b_sum.to(tl.float32)
    return b_score


@triton.jit
def _hash(b_low, b_span, o_d):
    b_low = b_low.to(tl.uint16, bitcast=True).to(tl.uint32)
    b_span = b_span.to(tl.uint16, bitcast=True).to(tl.uint32)
    b_word = (b_span << 16 | b_low) ^ (o_d.to(tl.uint32) * 0x9E3779B9)
    b_word = (b_word ^ b_word >> 16) * 0x85EBCA6B
    b_word = (b_word ^ b_word >> 13) * 0xC2B2AE35
    return ((b_word ^ b_word >> 16) >> 8).to(tl.float32)
