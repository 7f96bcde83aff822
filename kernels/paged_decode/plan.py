"""Work plan of decode attention on the GPU: blocks of each program, the same for all layers.

A request's blocks are sorted by rung (decode does not care about their order), and each run on one rung is split into
equal items: split alike, a request's result does not depend on its neighbours. Layers with a window have a plan of
their own, without the blocks before it; a run has its blocks in the order of their positions. ``DecodeWork.build`` is
plain tensor arithmetic on any device; steps on a GPU make the same plan in two launches, ``plan_triton.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .split import Bounds

ABSENT = -1  # rung of a block-table entry that holds no block


@dataclass(frozen=True)
class DecodeWork:
    """Work items of one decode step, all blocks of an item on one rung.

    Shapes:  addresses [B * P] int64, bytes;  positions [B * P] int32, a block's first token;  lengths [B] int32;
             items [W, 5] int32 (request, first block, blocks, part, rung), in the order of their rungs;
             item_first [R + 1] int32, where each rung's items begin; items behind the last one are undefined;
             part_first [B + 1] int32, where each request's parts begin;
             banks [B] int64, the addresses of the requests' banks, ``None`` without patterns
    """

    addresses: Tensor
    positions: Tensor
    lengths: Tensor
    items: Tensor
    item_first: Tensor
    part_first: Tensor
    bounds: Bounds
    sink_tokens: int
    block_tokens: int
    banks: Tensor | None = None
    window: int | None = None

    @classmethod
    def build(
        cls,
        addresses: Tensor,
        rungs: Tensor,
        lengths: Tensor,
        *,
        num_rungs: int,
        item_blocks: int,
        sink_tokens: int,
        block_tokens: int,
        bounds: Bounds | None = None,
        banks: Tensor | None = None,
        window: int | None = None,
    ) -> DecodeWork:
        """Plan for block tables ``addresses`` [B, P] int64 and ``rungs`` [B, P] (``ABSENT``: no block there).

        Runs are split into equal items of at most ``item_blocks`` blocks. With ``sink_tokens`` > 0 a request's first
        entry is its sink. ``bounds`` fixes the launch shape; without it bounds are exact. With ``window`` entries are
        left out, whatever they hold, whose tokens all come before a request's last ``window``.
        """
        device, (batch, width) = addresses.device, addresses.shape
        if window is not None:
            ends = block_positions(torch.arange(1, width + 1, device=device), sink_tokens, block_tokens)
            rungs = rungs.masked_fill(ends <= lengths[:, None] - window, ABSENT)
        keys, order = torch.where(rungs == ABSENT, num_rungs, rungs).sort(dim=1, stable=True)
        run_ends = torch.searchsorted(keys, torch.arange(num_rungs + 1, device=device).expand(batch, -1).contiguous())
        counts = run_ends.diff(dim=1)
        num_items = (counts + item_blocks - 1) // item_blocks  # [B, R]
        part_first = torch.zeros(batch + 1, dtype=torch.int64, device=device)
        part_first[1:] = num_items.sum(1).cumsum(0)
        item_first = torch.zeros(num_rungs + 1, dtype=torch.int64, device=device)
        item_first[1:] = num_items.sum(0).cumsum(0)
        present = num_items.sum(0).tolist()
        if bounds is None:
            bounds = Bounds(present[0], sum(present[1:]))
        # A run is the blocks of one request on one rung.
        run_first = part_first[:-1, None] + num_items.cumsum(1) - num_items
        ends = num_items.T.flatten().cumsum(0)
        index = torch.arange(bounds.num_items, device=device)
        run = torch.searchsorted(ends, index, right=True).clamp_(max=len(ends) - 1)
        rung, request = run // batch, run % batch
        share, shares = index - (ends[run] - num_items[request, rung]), num_items[request, rung].clamp(min=1)
        # Equal shares: a last item of one block would cost nearly as much as a whole one.
        skipped = share * counts[request, rung] // shares
        blocks = (share + 1) * counts[request, rung] // shares - skipped
        first = request * width + run_ends[request, rung] + skipped
        items = torch.stack((request, first, blocks, run_first[request, rung] + share, rung), 1)
        return cls(
            addresses.gather(1, order).flatten(),
            block_positions(order, sink_tokens, block_tokens).flatten().int(),
            lengths.int(),
            items.int(),
            item_first.int(),
            part_first.int(),
            bounds,
            sink_tokens,
            block_tokens,
            banks,
            window,
        )


def block_positions(index: Tensor, sink_tokens: int, block_tokens: int) -> Tensor:
    """First token of a request's block-table entries ``index``; with a sink, entry 0 is the sink."""
    if not sink_tokens:
        return index * block_tokens
    return (sink_tokens + (index - 1) * block_tokens).clamp(min=0)
