"""Work plan of prefill attention on the GPU: query tiles and the blocks that each one sees.

It is the same for all layers of one window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..paged_decode.plan import ABSENT, block_positions
from ..to_device import to_device

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PrefillWork:
    """Query tiles of several chunks, each of one request; tiles that see the most come first.

    Shapes:  addresses [C * P] int64, bytes;
             tiles [N, 3] int32 (first row of q, tokens, position of the first token);
             runs [R, N, 4] int32 (first block, sinks, other blocks, position of the first other block)
             blocks: for each rung, the entries [M] int32 of addresses that any tile sees, ascending;
             banks [C] int64, the addresses of the chunks' banks, ``None`` without patterns;
             positions [C * P] int32, the first token of each block, ``None`` without a window
             chunk_blocks: for each rung, how many entries of ``blocks`` each chunk has, on the host
    ``rungs`` lists the rungs that any tile sees; rung 0 has the chunks themselves. A run's position counts its blocks
    as if they followed one another up to the first one that ends behind the tile's first query. With a ``window`` a run
    begins with the first block that a query of the tile sees.
    """

    addresses: Tensor
    tiles: Tensor
    runs: Tensor
    blocks: tuple[Tensor, ...]
    rungs: tuple[int, ...]
    tile_tokens: int
    sink_tokens: int
    block_tokens: int
    banks: Tensor | None = None
    window: int | None = None
    positions: Tensor | None = None
    chunk_blocks: tuple[tuple[int, ...], ...] = ()

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
        banks: Tensor | None = None,
        window: int | None = None,
    ) -> PrefillWork:
        """Plan for chunks of ``counts`` tokens from positions ``starts`` [C], whose rows of q follow one another.

        ``addresses`` [C, P] and ``rungs`` [C, P] (``ABSENT``: no block) are the requests' block tables, with the
        chunk's own tokens written, on rung 0; with ``sink_tokens`` > 0 the first entry is the sink. With ``window``
        entries are left out, whatever they hold, that no query of the chunk sees.
        """
        device, width = addresses.device, addresses.shape[1]
        addresses, rungs, starts, counts = (x.cpu() for x in (addresses, rungs, starts, counts))
        if window is not None:
            ends = block_positions(torch.arange(1, width + 1), sink_tokens, block_tokens)
            rungs = rungs.masked_fill(ends <= starts[:, None] + 1 - window, ABSENT)
        keys, order = torch.where(rungs == ABSENT, num_rungs, rungs).sort(dim=1, stable=True)
        positions = block_positions(order, sink_tokens, block_tokens)
        # NumPy from here on: on arrays of this size torch wakes its threads, which takes longer than the work.
        row, tokens, first, chunk = _tiles(starts.numpy(), counts.numpy(), tile_tokens)
        key, position, is_first = keys.numpy()[chunk], positions.numpy()[chunk], order.numpy()[chunk] == 0
        seen = position < (first + tokens)[:, None]
        passed = np.zeros_like(seen)
        if window is not None:
            block_ends = block_positions(order + 1, sink_tokens, block_tokens).numpy()[chunk]
            passed = block_ends <= (first + 1 - window)[:, None]
            seen &= ~passed
        sink = is_first & (sink_tokens > 0)
        full = seen & ~sink & (position + block_tokens - 1 <= first[:, None])
        tail = sink_tokens + (first + 1 - sink_tokens).clip(min=0) // block_tokens * block_tokens
        runs = []
        for rung in range(num_rungs):
            mine = key == rung
            before = (key < rung) | (mine & passed)
            start = chunk * width + before.sum(1)
            sinks, others = ((seen & mine & part).sum(1) for part in (sink, ~sink))
            runs.append(np.stack((start, sinks, others, tail - (mine & full).sum(1) * block_tokens), 1))
        used = torch.where(positions < (starts + counts)[:, None], keys, num_rungs).flatten()
        blocks = tuple(torch.nonzero(used == rung).flatten().int() for rung in range(num_rungs))
        in_chunks = [torch.bincount(some // width, minlength=len(starts)).tolist() for some in blocks]
        return cls(
            addresses.gather(1, order).flatten(),
            torch.from_numpy(np.stack((row, tokens, first), 1)).int(),
            torch.from_numpy(np.stack(runs)).int(),
            blocks,
            tuple(rung for rung, some in enumerate(blocks) if len(some)),
            tile_tokens,
            sink_tokens,
            block_tokens,
            banks,
            window,
            None if window is None else positions.flatten().int(),
            tuple(map(tuple, in_chunks)),
        ).to(device)
    def of_rows(self, rows: Tensor) -> PrefillWork:
        """The plan, on the host, of the tiles alone that have any of the rows [M] of q."""
        tiles, ascending = self.tiles.numpy(), np.sort(rows.numpy())
        before, behind = (np.searchsorted(ascending, edge) for edge in (tiles[:, 0], tiles[:, 0] + tiles[:, 1]))
        asked = before < behind
        runs = self.runs.numpy().compress(asked, axis=1)  # in order of memory
        return replace(self, tiles=torch.from_numpy(tiles[asked]), runs=torch.from_numpy(runs))


    def to(self, device: torch.device) -> PrefillWork:
        """The same plan on another device."""
        addresses, tiles, runs, *blocks = (
            to_device(x, device) for x in (self.addresses, self.tiles, self.runs, *self.blocks)
        )
        banks, positions = (None if x is None else to_device(x, device) for x in (self.banks, self.positions))
        return replace(
            self, addresses=addresses, tiles=tiles, runs=runs, blocks=tuple(blocks), banks=banks, positions=positions
        )


def _tiles(starts: Ints, counts: Ints, tile_tokens: int) -> tuple[Ints, Ints, Ints, Ints]:
    """First row of q, tokens, position and chunk of each tile [N]: the heaviest first, light ones fill the end."""
    num_tiles = (counts + tile_tokens - 1) // tile_tokens
    ends = num_tiles.cumsum()
    chunk = np.arange(len(counts)).repeat(num_tiles)
    offset = (np.arange(ends[-1]) - (ends - num_tiles)[chunk]) * tile_tokens
    heaviest = (-(starts[chunk] + offset)).argsort(kind="stable")
    chunk, offset = chunk[heaviest], offset[heaviest]
    tokens = (counts[chunk] - offset).clip(max=tile_tokens)
    return (counts.cumsum() - counts)[chunk] + offset, tokens, starts[chunk] + offset, chunk
