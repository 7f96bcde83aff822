"""Mining: the patterns of a request's bank, by k-means over its first tokens, and the centres of later windows."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ..formats import BlockLayout, PageShape, Side
from ..formats.dense.cpu import elements
from ..formats.family import LIMIT
from ..formats.page import Step
from ..formats.rows import even_runs, run_bank, run_rows
from ..to_device import to_device
from .kmeans import MAX_CANDIDATES, evenly, kmeans

MAX_TOKENS = 1024  # tokens clustered; more are thinned evenly, since time grows with them
SCRATCH_NBYTES = 512 << 20  # bytes of scratch for the sides clustered at a time; more saves launches

Runs = list[tuple[list[Step], Side]]


def mine(
    memory: Tensor, blocks: list[int], num_tokens: int, bank: int, source: BlockLayout, target: BlockLayout
) -> None:
    """Writes the whole bank at address ``bank``: the means of k-means over a request's tokens, then zeros.

    Layers, sides and heads are clustered apart: every dense side of ``source`` that has patterns in ``target``. Nothing
    here waits for the device, and the result depends on the tokens alone.

    Shapes:  memory [M] uint8;  blocks: byte addresses of the request's first dense blocks, laid out as ``source``, in
             the order of tokens, of which the first ``num_tokens`` are used, at least one
    """
    memory[bank : bank + target.bank_nbytes].zero_()
    alike: dict[tuple[PageShape, torch.dtype, int], Runs] = defaultdict(list)
    for (old, new), steps in source.steps(target).items():
        if old.dense_dtype is not None and new.bank_nbytes:
            alike[old.shape, old.dense_dtype, new.num_patterns] += [(run, new) for run in even_runs(steps)]
    tokens = evenly(num_tokens, MAX_TOKENS)
    for (shape, dtype, number), runs in alike.items():
        number = min(number, len(tokens))
        offsets = [step.source.codes for run, _ in runs for step in run]
        patterns = _patterns(memory, blocks, tokens, offsets, shape, dtype, number)
        for (run, new), found in zip(runs, patterns.split([len(run) for run, _ in runs]), strict=True):
            out = run_bank(memory, bank, run, new)[:, : number * new.pattern_nbytes].view(torch.float16)
            out.view(found.shape).copy_(found)


def add_centres(
    memory: Tensor, first: int, blocks: list[int], bank: int, source: BlockLayout, target: BlockLayout
) -> None:
    """Writes the centres of a request's later windows behind the mined patterns of the bank at address ``bank``.

    A centre is the middle of each channel's range over the window's tokens. Source: PatternKV (arXiv 2510.05176), eq. 5

    Shapes:  memory [M] uint8;  blocks: byte addresses of dense blocks, laid out as ``source``: windows ``first``,
             ``first`` + 1, ..., of which a side takes as many as it has room for
    """
    for (old, new), steps in source.steps(target).items():
        if old.dense_dtype is None or not new.num_later:
            continue
        for run in even_runs(steps):
            bytes_ = run_bank(memory, bank, run, new)[:, : new.visible_nbytes(new.num_later)]
            patterns = bytes_.view(torch.float16).unflatten(1, (-1, old.shape.num_kv_heads, old.shape.head_dim))
            for index, address in enumerate(blocks[: max(0, new.num_later - first)], new.num_patterns + first):
                rows, _ = run_rows(memory, address, address, run, old, old)
                patterns[:, index].copy_(_centre(elements(rows, old)))


def _centre(x: Tensor) -> Tensor:
    """The middle of each channel's range: [n, H, T, D] of any float type to [n, H, D] float32."""
    low, high = x.float().nan_to_num(0.0, 0.0, 0.0).clamp(-LIMIT, LIMIT).aminmax(dim=2)
    return (low + high) / 2


def _patterns(
    memory: Tensor, blocks: list[int], tokens: Tensor, offsets: list[int], shape: PageShape, dtype: torch.dtype,
    number: int,
) -> Tensor:  # fmt: skip
    """The patterns [n, number, H, D] of dense sides at n offsets in the blocks, as many at a time as scratch allows."""
    row_nbytes = shape.head_dim * dtype.itemsize
    rows = memory[: memory.numel() - memory.numel() % row_nbytes].view(dtype).view(-1, shape.head_dim)
    first = torch.tensor(blocks)[tokens // shape.num_tokens] // row_nbytes + tokens % shape.num_tokens
    at = to_device(torch.tensor(offsets) // row_nbytes, memory.device)[:, None, None] + to_device(first, memory.device)
    at = at + torch.arange(shape.num_kv_heads, device=memory.device)[:, None] * shape.num_tokens
    found = []
    for some in at.split(max(1, SCRATCH_NBYTES // _side_nbytes(len(tokens), number, shape, dtype))):
        x = rows.index_select(0, some.flatten()).view(-1, len(tokens), shape.head_dim)
        means = _means(x.nan_to_num_(0.0, 0.0, 0.0).clamp_(-LIMIT, LIMIT), number)
        found.append(means.clamp_(-LIMIT, LIMIT).view(len(some), -1, number, shape.head_dim).transpose(1, 2))
    return torch.cat(found)


def _means(x: Tensor, number: int) -> Tensor:
    """The means of clusters of 16-bit or float32 tokens, centred first so that 16 bits tell the tokens apart."""
    middle = x.mean(1, keepdim=True)
    x = x.sub_(middle)
    return kmeans(x if x.dtype == torch.float32 else x.bfloat16(), number).add_(middle)


def _side_nbytes(num_tokens: int, number: int, shape: PageShape, dtype: torch.dtype) -> int:
    """Scratch of a side: its tokens, and the larger of the temporaries of k-means' start and of an iteration."""
    start = 4 * MAX_CANDIDATES * (shape.head_dim + MAX_CANDIDATES)
    iteration = num_tokens * (2 * number * dtype.itemsize + 8)
    return shape.num_kv_heads * (num_tokens * shape.head_dim * dtype.itemsize + max(start, iteration))


__all__ = ["MAX_TOKENS", "add_centres", "mine"]
