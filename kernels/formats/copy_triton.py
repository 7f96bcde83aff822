"""A device function that copies bytes by one program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_bytes(p_from, p_to, NBYTES: tl.constexpr):
    """Copies ``NBYTES`` bytes; addresses that are multiples of 16 allow wide copies."""
    TILE_N: tl.constexpr = 2048
    for start in range(0, NBYTES, TILE_N):
        o_byte = start + tl.arange(0, TILE_N)
        m_byte = o_byte < NBYTES
        tl.store(p_to + o_byte, tl.load(p_from + o_byte, mask=m_byte, other=0), mask=m_byte)
