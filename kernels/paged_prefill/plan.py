"""Work plan of prefill attention on the GPU: query tiles and the blocks that each one sees.

It is the same for all layers of one window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..paged_decode.plan import ABSENT
from ..to_device import all_to_device

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
        # NumPy, not torch, which wakes its threads for arrays of this size: that takes longer than the work.
        device, (num_chunks, width) = addresses.device, addresses.shape
        address, keys, begin, count = (x.cpu().numpy() for x in (addresses, rungs, starts, counts))
        borders = sink_tokens + (np.arange(width + 1) - bool(sink_tokens)) * block_tokens  # of neighbouring entries
        borders[0] = 0
        keys = np.where(keys == ABSENT, num_rungs, keys)
        if window is not None:
            keys[borders[1:] <= begin[:, None] + 1 - window] = num_rungs
        sink_key, order, line = keys[:, 0], keys.argsort(axis=1, kind="stable"), np.arange(num_chunks)[:, None]
        keys, positions = keys[line, order], borders[order]
        # All entries in one ascending row, by their chunk, rung and the token that they begin at, or end before.
        span = borders[-1] + 1
        first_words = (line * (num_rungs + 1) + keys) * span
        begins, ends = (first_words + positions).ravel(), (first_words + borders[order + 1]).ravel()
        row, tokens, first, chunk = _tiles(begin, count, tile_tokens)
        passed = np.zeros_like(first) if window is None else (first + 1 - window).clip(min=0)
        sees_sink = (sink_tokens > 0) & (passed < sink_tokens)
        tail = sink_tokens + (first + 1 - sink_tokens).clip(min=0) // block_tokens * block_tokens
        runs = np.empty((num_rungs, len(chunk), 4), dtype=np.int32)
        for rung in range(num_rungs):
            word = (chunk * (num_rungs + 1) + rung) * span
            start = ends.searchsorted(word + passed, side="right")
            sinks = sees_sink & (sink_key[chunk] == rung)
            others = begins.searchsorted(word + first + tokens) - start - sinks
            full = ends.searchsorted(word + first + 1, side="right") - start - (sinks & (sink_tokens <= first + 1))
            runs[rung].T[:] = start, sinks, others, tail - full * block_tokens
        used = np.where(positions < (begin + count)[:, None], keys, num_rungs).ravel()
        blocks = [np.flatnonzero(used == rung) for rung in range(num_rungs)]
        return cls(
            torch.from_numpy(address[line, order].ravel()),
            _int32(np.stack((row, tokens, first), 1)),
            torch.from_numpy(runs),
            tuple(map(_int32, blocks)),
            tuple(rung for rung, some in enumerate(blocks) if len(some)),
            tile_tokens,
            sink_tokens,
            block_tokens,
            banks,
            window,
            None if window is None else _int32(positions.ravel()),
            tuple(tuple(np.bincount(some // width, minlength=num_chunks).tolist()) for some in blocks),
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
        if device == self.addresses.device:
            return self
        names = ("addresses", "tiles", "runs", "banks", "positions")
        own = {name: x for name in names if (x := getattr(self, name)) is not None}
        found = all_to_device([*own.values(), *self.blocks], device)
        moved: dict[str, Any] = dict(zip(own, found, strict=False))  # those of blocks are left
        return replace(self, **moved, blocks=tuple(found[len(own) :]))

    def with_tiles_of(self, other: PrefillWork) -> PrefillWork:
        """This plan with the tiles alone that ``other``, on the host, has."""
        tiles, runs = all_to_device((other.tiles, other.runs), self.tiles.device)
        return replace(self, tiles=tiles, runs=runs)


def _int32(x: Ints) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))


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
