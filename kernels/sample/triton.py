"""Sampling in Triton: two launches for greedy rows, three with draws, four with top_k or top_p; see ``sample``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..fusion import UNFUSED
from .draw_kernel import peak_kernel, pick_kernel, weigh_kernel
from .edit_kernel import copy_kernel, edit_kernel
from .edits import Edits
from .limit_kernel import limit_kernel
from .reference import TILE
from .settings import Settings

BLOCK_TILES = 16  # tiles a program reads at once; more take more registers
PROGRAMS = 1024  # about 8 on each multiprocessor
KEYS = 2048  # tokens among which a floor is searched in registers; more are narrowed down first
LIMIT_WARPS = 16  # with fewer the kernel runs out of registers
ENTRIES = 128  # edits a program applies


class Shares(NamedTuple):
    """Division of a row into ``num_shares`` shares of ``blocks`` blocks, of ``num_tiles`` tiles in all."""

    num_tiles: int
    num_shares: int
    blocks: int


def split(num_rows: int, vocab_size: int) -> Shares:
    """Shares that fill the device, however few the rows; results do not depend on them."""
    num_tiles = triton.cdiv(vocab_size, TILE)
    num_blocks = triton.cdiv(num_tiles, BLOCK_TILES)
    blocks = triton.cdiv(num_blocks, max(1, min(num_blocks, PROGRAMS // num_rows)))
    return Shares(num_tiles, triton.cdiv(num_blocks, blocks), blocks)


def padded_sizes(vocab_size: int) -> dict[str, int]:
    """Powers of two that hold a row's tiles, and its shares when it is the only row."""
    num_tiles = triton.cdiv(vocab_size, TILE)
    padded = (max(16, triton.next_power_of_2(n)) for n in (num_tiles, triton.cdiv(num_tiles, BLOCK_TILES)))
    return dict(zip(("TILES", "TILE_S"), padded, strict=True))


def sample_variants(vocab_size: int) -> list[tuple[Any, dict[str, Any], int]]:
    """Kernels with their compile-time arguments and warps, in the variants that do the most."""
    tiles, padded = {"BLOCK_TILES": BLOCK_TILES, "TILE": TILE}, padded_sizes(vocab_size)
    flags = {"HAS_RAW": True, "HAS_DRAWS": True, "HAS_FLOORS": True}
    return [
        (peak_kernel, {**tiles, "HAS_TILE_PEAKS": True}, 4),
        (weigh_kernel, {**tiles, "TILE_S": padded["TILE_S"]}, 4),
        (limit_kernel, {**tiles, **padded, "KEYS": KEYS}, LIMIT_WARPS),
        (pick_kernel, {"TILE": TILE, **padded, **flags}, 4),
        (copy_kernel, {"TILE": BLOCK_TILES * TILE}, 4),
        (edit_kernel, {"TILE": ENTRIES}, 4),
    ]


def sample_triton(logits: Tensor, settings: Settings | None, raw_peak: Tensor | None) -> Tensor:
    """See ``sample``."""
    num_rows, vocab_size = logits.shape
    logits, device = _rows_contiguous(logits), logits.device
    num_tiles, num_shares, blocks = split(num_rows, vocab_size)
    limited = settings is not None and settings.limited
    tiles, padded = {"BLOCK_TILES": BLOCK_TILES, "TILE": TILE}, padded_sizes(vocab_size)
    sizes, grid = (logits.stride(0), vocab_size, num_tiles), (num_rows, num_shares)
    sampled = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    peaks = torch.empty(grid, dtype=torch.float32, device=device)
    ids = torch.empty(grid, dtype=torch.int32, device=device)
    sums = floors = tile_peaks = rows = positions = sampled  # a placeholder pointer for unused arguments
    if limited:
        tile_peaks = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    peak_kernel[grid](logits, peaks, ids, tile_peaks, *sizes, blocks, HAS_TILE_PEAKS=limited, **tiles, **UNFUSED)
    if settings is not None:
        rows, positions = settings.rows, settings.positions
        sums = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device)
        weigh_kernel[grid](
            logits, peaks, rows, sums, *sizes, blocks, num_shares, TILE_S=padded["TILE_S"], **tiles, **UNFUSED
        )
    if limited:
        floors = torch.empty(num_rows, dtype=torch.float32, device=device)
        live = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
        keys = torch.empty(num_rows, KEYS, dtype=torch.int32, device=device)
        limit_kernel[(num_rows,)](
            logits, peaks, tile_peaks, rows, floors, sums, live, keys, *sizes, num_shares,
            **tiles, **padded, KEYS=KEYS, num_warps=LIMIT_WARPS, **UNFUSED,
        )  # fmt: skip
    flags = {"HAS_RAW": raw_peak is not None, "HAS_DRAWS": settings is not None, "HAS_FLOORS": limited}
    raw_peaks = sampled if raw_peak is None else raw_peak
    pick_kernel[(num_rows,)](
        logits, raw_peaks, peaks, ids, rows, positions, floors, sums, sampled, *sizes, num_shares,
        TILE=TILE, **padded, **flags, **UNFUSED,
    )  # fmt: skip
    return sampled


def edit_triton(logits: Tensor, edits: Edits) -> tuple[Tensor, Tensor]:
    """See ``edit``."""
    num_rows, vocab_size = logits.shape
    logits, device = _rows_contiguous(logits), logits.device
    edited = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    raw_peak = torch.full((num_rows,), float("-inf"), device=device)
    _, num_shares, blocks = split(num_rows, vocab_size)
    copy_kernel[(num_rows, num_shares)](
        logits, edits.penalties, edited, raw_peak, logits.stride(0), vocab_size, blocks, TILE=BLOCK_TILES * TILE,
        **UNFUSED,
    )  # fmt: skip
    start = 0
    for end, source in zip(edits.ends, (logits, edited, edited), strict=True):
        if end > start:
            edit_kernel[(triton.cdiv(end - start, ENTRIES),)](
                source, edits.penalties, edits.rows, edits.tokens, edits.counts, edits.biases, edited,
                source.stride(0), vocab_size, start, end, TILE=ENTRIES, **UNFUSED,
            )  # fmt: skip
        start = end
    return edited, raw_peak


def _rows_contiguous(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
