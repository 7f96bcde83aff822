"""Work plan of prefill attention on the GPU: query tiles, and the blocks each one sees, the same for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..copies import to_device
from ..paged_decode.plan import ABSENT, block_positions


@dataclass(frozen=True)
class PrefillWork:
    """Query tiles of several chunks, each of one request.

    Shapes:  addresses [C * P] int64, bytes;  positions [C * P] int32, a block's first token;
             tiles [N, 3] int32 (first row of q, tokens, position of the first token);
             runs [R, N, 4] int32 (first block, sinks, blocks all of whose tokens every query sees, other blocks)
             blocks: for each rung, the entries [M] int32 of addresses that any tile sees, ascending
    ``rungs`` lists the rungs that any tile sees.
    """

    addresses: Tensor
    positions: Tensor
    tiles: Tensor
    runs: Tensor
    blocks: tuple[Tensor, ...]
    rungs: tuple[int, ...]
    tile_tokens: int
    sink_tokens: int
    block_tokens: int

    @classmethod
    def build(
        cls,
        addresses: Tensor,
        rungs: Tensor,
        starts: Tensor,
        counts: Tensor,
        *,
        num_rungs: int,
        tile_tokens: int,
        sink_tokens: int,
        block_tokens: int,
    ) -> PrefillWork:
        """Plan for chunks of ``counts`` tokens from positions ``starts`` [C], whose rows of q follow one another.

        ``addresses`` [C, P] and ``rungs`` [C, P] (``ABSENT``: no block) are the requests' block tables, with the
        chunk's own tokens written; with ``sink_tokens`` > 0 the first entry is the sink.
        """
        device, width = addresses.device, addresses.shape[1]
        keys, order = torch.where(rungs == ABSENT, num_rungs, rungs).sort(dim=1, stable=True)
        positions = block_positions(order, sink_tokens, block_tokens)
        ends = ((counts + tile_tokens - 1) // tile_tokens).cumsum(0)
        # Later tiles see more: they start first, so that the short ones fill the end of the launch.
        index = torch.arange(int(ends[-1]), device=device).flip(0)
        chunk = torch.searchsorted(ends, index, right=True)
        tiles_before = torch.where(chunk > 0, ends[chunk - 1], 0)
        offset = (index - tiles_before) * tile_tokens
        tokens = (counts[chunk] - offset).clamp(max=tile_tokens)
        row = (counts.cumsum(0) - counts)[chunk] + offset
        first = starts[chunk] + offset
        seen = positions[chunk] < (first + tokens)[:, None]
        sink = (order[chunk] == 0) & (sink_tokens > 0)
        full = (positions[chunk] + block_tokens - 1 <= first[:, None]) & ~sink
        runs = []
        for rung in range(num_rungs):
            mine = seen & (keys[chunk] == rung)
            start = chunk * width + (keys[chunk] < rung).sum(1)
            parts = (mine & sink, mine & full, mine & ~sink & ~full)
            runs.append(torch.stack((start, *(p.sum(1) for p in parts)), 1))
        every = torch.stack(runs)
        used = torch.where(positions < (starts + counts)[:, None], keys, num_rungs).flatten()
        return cls(
            addresses.gather(1, order).flatten(),
            positions.flatten().int(),
            torch.stack((row, tokens, first), 1).int(),
            every.int(),
            tuple(torch.nonzero(used == rung).flatten().int() for rung in range(num_rungs)),
            tuple(r for r, n in enumerate(every[:, :, 1:].sum((1, 2)).tolist()) if n),
            tile_tokens,
            sink_tokens,
            block_tokens,
        )

    def to(self, device: torch.device) -> PrefillWork:
        """The same plan on another device."""
        names = ("addresses", "positions", "tiles", "runs")
        moved: dict[str, Any] = {n: to_device(getattr(self, n), device) for n in names}
        return replace(self, **moved, blocks=tuple(to_device(b, device) for b in self.blocks))
