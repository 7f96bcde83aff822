"""Work plan of decode attention on the GPU: which program attends to which blocks, the same for all layers.

A request's blocks are sorted by rung (decode does not care about their order) and each run is cut at a fixed number
of blocks, finer in the last requests (``cut.py``): cut alike, a request's result does not depend on its neighbours.
``DecodeWork.build`` is plain tensor arithmetic on any device; steps on a GPU make the same plan in two launches,
``plan_triton.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .split import num_last

ABSENT = -1  # rung of a block-table entry that holds no block


@dataclass(frozen=True)
class DecodeWork:
    """Work items of one decode step.

    Shapes:  addresses [B * P] int64, bytes;  positions [B * P] int32, a block's first token;  lengths [B] int32;
             items [R, W, 4] int32 (request, first block, blocks, part), unused ones with 0 blocks;
             part_first [B + 1] int32, where each request's parts start
    ``num_items`` has the grid of each rung's launch (0: no launch); ``num_parts`` bounds the parts of all requests;
    ``short`` says of each rung whether its items are short (empty: none is), which another launch suits.
    """

    addresses: Tensor
    positions: Tensor
    lengths: Tensor
    items: Tensor
    part_first: Tensor
    num_items: tuple[int, ...]
    num_parts: int
    sink_tokens: int
    block_tokens: int
    short: tuple[bool, ...] = ()

    @classmethod
    def build(
        cls,
        addresses: Tensor,
        rungs: Tensor,
        lengths: Tensor,
        *,
        split_blocks: Sequence[int],
        sink_tokens: int,
        block_tokens: int,
        max_items: int | None = None,
        last_blocks: int | None = None,
    ) -> DecodeWork:
        """Plan for block tables ``addresses`` [B, P] int64 and ``rungs`` [B, P] (``ABSENT``: no block there).

        A run on rung r is cut into equal items of at most ``split_blocks[r]`` blocks, or ``last_blocks`` in the last
        requests. With ``sink_tokens`` > 0 a
        request's first entry is its sink. ``max_items`` fixes the shapes of all rungs' launches; without it they are
        exact, which reads the tensors.
        """
        num_rungs, device = len(split_blocks), addresses.device
        batch, width = addresses.shape
        keys, order = torch.where(rungs == ABSENT, num_rungs, rungs).sort(dim=1, stable=True)
        splits_at = torch.tensor(split_blocks, device=device).repeat(batch, 1)
        if last_blocks is not None:
            splits_at[batch - num_last(batch) :] = last_blocks
        bounds = torch.searchsorted(keys, torch.arange(num_rungs + 1, device=device).expand(batch, -1).contiguous())
        counts = bounds.diff(dim=1)
        splits = (counts + splits_at - 1) // splits_at
        part_first = torch.zeros(batch + 1, dtype=torch.int64, device=device)
        part_first[1:] = splits.sum(1).cumsum(0)
        ends = splits.T.cumsum(1)  # [R, B] items of a rung up to and with each request
        if max_items is None:
            num_items = tuple(ends[:, -1].tolist())
            num_parts = sum(num_items)
        else:
            num_items = (max_items,) * num_rungs
            num_parts = max_items * num_rungs
        index = torch.arange(max(num_items), device=device).expand(num_rungs, -1).contiguous()
        request = torch.searchsorted(ends.contiguous(), index, right=True).clamp_(max=batch - 1)
        split = index - (ends - splits.T).gather(1, request)
        # Equal shares: a last item of one block would cost nearly what a whole one does.
        held, shares = counts.T.gather(1, request), splits.T.gather(1, request).clamp(min=1)
        skipped = split * held // shares
        share = (split + 1) * held // shares - skipped
        part_base = part_first[:-1, None] + splits.cumsum(1) - splits
        items = torch.stack(
            (
                request,
                request * width + bounds[:, :-1].T.gather(1, request) + skipped,
                share.where(index < ends[:, -1:], 0),
                part_base.T.gather(1, request) + split,
            ),
            dim=-1,
        )
        return cls(
            addresses.gather(1, order).flatten(),
            block_positions(order, sink_tokens, block_tokens).flatten().int(),
            lengths.int(),
            items.int(),
            part_first.int(),
            num_items,
            num_parts,
            sink_tokens,
            block_tokens,
        )


def block_positions(index: Tensor, sink_tokens: int, block_tokens: int) -> Tensor:
    """First token of a request's block-table entries ``index``; with a sink, entry 0 is the sink."""
    if not sink_tokens:
        return index * block_tokens
    return (sink_tokens + (index - 1) * block_tokens).clamp(min=0)
