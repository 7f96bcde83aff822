"""Demotion in vectorised torch: packed words to packed words, all layers of a block at once."""

from __future__ import annotations

from torch import Tensor

from ..bits import narrow
from ..layout import BlockLayout, UniformSide
from ..pages import even_runs, meta_tile, packed_codes, read_meta, run_rows, tops


def demote_cpu(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """See ``demote``."""
    blocks = list(zip(src.tolist(), dst.tolist(), strict=True))
    for (old, new), members in source.pairs(target).items():
        if not isinstance(old, UniformSide) or not isinstance(new, UniformSide):
            continue
        for run in even_runs(members):
            for a, b in blocks:
                rows, out = run_rows(memory, a, b, run, old, new)
                if old == new:
                    out.copy_(rows)
                else:
                    _demote(rows, out, old, new)


def _demote(rows: Tensor, out: Tensor, old: UniformSide, new: UniformSide) -> None:
    """Shapes:  rows [n, old.nbytes], out [n, new.nbytes] uint8"""
    narrow(packed_codes(rows, old), old.bits, new.bits, old.side, old.num_tokens, packed_codes(out, new))
    tile = meta_tile(out, new)
    tile.copy_(read_meta(rows, old).view(tile.shape))
    tops(out, new).copy_(tops(rows, old))
