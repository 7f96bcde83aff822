"""Words of block tables, which the books write and the kernels read: an address and a rung in one int64. No torch."""

from __future__ import annotations

RUNG_BITS = 8  # low bits of a block's word, which hold its rung; the address of its slot is in the others
