"""Mining: the first patterns of a request's bank, by k-means over tokens of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import BlockLayout, Side
from ..formats.page import Step
from ..formats.rows import even_runs, run_bank
from ..formats.uniform.reference import LIMIT
from .kmeans import kmeans

MAX_TOKENS = 1024  # tokens looked at; more are thinned evenly
MAX_MINED = 32  # patterns found, at most one a token
PIECE_NBYTES = 64 << 20  # of tokens in float32 that are clustered at a time


def num_mined(num_patterns: int, num_tokens: int) -> int:
    """How many patterns of a bank of ``num_patterns`` are mined from a prompt of ``num_tokens`` tokens in blocks."""
    return min(MAX_MINED, num_patterns, num_tokens)


def mine(
    memory: Tensor, blocks: list[int], num_tokens: int, bank: int, source: BlockLayout, target: BlockLayout
) -> None:
    """Writes the whole bank at address ``bank``: the centres of k-means over a request's tokens, then zeros.

    Each layer, side and head by itself, every dense side of ``source`` that has patterns in ``target``. Nothing here
    waits for the device, and the result depends on the tokens alone.

    Shapes:  memory [M] uint8;  blocks: byte addresses of the request's first dense blocks, laid out as ``source``, in
             the order of tokens, of which the first ``num_tokens`` are used
    """
    memory[bank : bank + target.bank_nbytes].zero_()
    for (old, new), steps in source.steps(target).items():
        if old.dense_dtype is None or not new.bank_nbytes or not num_tokens:
            continue
        for run in even_runs(steps):
            _mine_run(memory, blocks, num_tokens, bank, run, old, new)


def _mine_run(
    memory: Tensor, blocks: list[int], num_tokens: int, bank: int, run: list[Step], old: Side, new: Side
) -> None:
    """The patterns of the sides of a run, some of them at a time."""
    shape, tokens = old.shape, _thinned(num_tokens)
    number = num_mined(new.num_patterns, num_tokens)
    out = run_bank(memory, bank, run, new)[:, : number * new.pattern_nbytes]
    rows = _rows(memory, old)
    first = torch.tensor(blocks)[tokens // shape.num_tokens] // _row_nbytes(old) + tokens % shape.num_tokens
    first = _send(first, memory.device)
    heads = torch.arange(shape.num_kv_heads, device=memory.device)[:, None] * shape.num_tokens
    step = max(1, PIECE_NBYTES // (4 * shape.num_kv_heads * len(tokens) * shape.head_dim))
    for start in range(0, len(run), step):
        offsets = torch.tensor([member.source.codes // _row_nbytes(old) for member in run[start : start + step]])
        at = _send(offsets, memory.device)[:, None, None] + heads + first
        x = rows.index_select(0, at.flatten()).view(-1, len(tokens), shape.head_dim).float()
        x = x.nan_to_num_(0.0, 0.0, 0.0).clamp_(-LIMIT, LIMIT)
        patterns = kmeans(x, number).view(-1, shape.num_kv_heads, number, shape.head_dim).transpose(1, 2)
        out[start : start + step].view(torch.float16).view(patterns.shape).copy_(patterns)


def _send(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for."""
    return x if device == x.device else x.pin_memory().to(device, non_blocking=True)


def _rows(memory: Tensor, side: Side) -> Tensor:
    """The arena as rows of one token and head [R, D] of a dense side, which dense slots begin at."""
    assert side.dense_dtype is not None
    nbytes = memory.numel() - memory.numel() % _row_nbytes(side)
    return memory[:nbytes].view(side.dense_dtype).view(-1, side.shape.head_dim)


def _row_nbytes(side: Side) -> int:
    assert side.dense_dtype is not None
    return side.shape.head_dim * side.dense_dtype.itemsize


def _thinned(num_tokens: int) -> Tensor:
    """Up to ``MAX_TOKENS`` of the first ``num_tokens`` tokens, evenly spaced."""
    number = min(num_tokens, MAX_TOKENS)
    return torch.arange(number) * num_tokens // number


__all__ = ["MAX_MINED", "MAX_TOKENS", "mine", "num_mined"]
