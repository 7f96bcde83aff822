"""Few numbers of rows, to which products on the CPU are padded."""

from __future__ import annotations

from functools import cache

import torch


@cache
def padded_rows(num_rows: int, device: torch.device) -> int:
    """Rows to compute for ``num_rows``: one of few sizes on the CPU, elsewhere ``num_rows``.

    oneDNN compiles a kernel for every new number of rows and keeps a thousand of them: batches of every size would cost
    2 ms and half a megabyte a matrix shape each, gigabytes in the end. Two sizes an octave up to 256 rows, where an
    extra row costs little, then multiples of 64 and 128.
    """
    if device.type != "cpu":
        return num_rows
    octave = 1 << (num_rows - 1).bit_length()
    step = min(max(1, octave // 4), 64 if num_rows <= 512 else 128)
    return -(-num_rows // step) * step
