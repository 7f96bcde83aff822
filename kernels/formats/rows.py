"""Bytes of block slots as rows of a tensor, in place where they lie in even steps."""

from __future__ import annotations

import torch
from torch import Tensor

from .family import Side, SideBytes
from .page import PageLayout, Place, Step


def gather(memory: Tensor, addresses: Tensor, nbytes: int) -> Tensor:
    """Copies of ``nbytes`` bytes of the arena from each address.

    Shapes:  memory [M] uint8;  addresses [n] int64, multiples of 16;  returns [n, nbytes] uint8
    """
    words = memory.view(torch.int64)
    # One overlapping row for every 16-byte position, so that a single index_select copies whole runs of bytes.
    num_words = -(-nbytes // 8)
    num_rows = (memory.numel() - 8 * num_words) // 16 + 1
    rows = words.as_strided((num_rows, num_words), (2, 1), words.storage_offset())
    return rows.index_select(0, addresses >> 4).view(torch.uint8)[:, :nbytes]


def page_rows(
    memory: Tensor, where: Tensor | range, page: PageLayout, banks: Tensor | None = None
) -> tuple[SideBytes, SideBytes]:
    """K and V of one layer in the blocks at ``where``: addresses [n] int64, or even steps, which are read in place.

    ``banks``: addresses [n] int64 of the banks of the blocks' requests, or [1] of the only one.
    """
    first, last = page.span
    if isinstance(where, range):
        step = where.step if len(where) > 1 else last - first
        k, v = page.rows(memory.as_strided((len(where), last - first), (step, 1), where.start + first))
    else:
        k, v = page.rows(gather(memory, where + first, last - first))
    if banks is None:
        return k, v
    return (
        k._replace(bank=_patterns(memory, banks + page.k_bank, page.k, len(where))),
        v._replace(bank=_patterns(memory, banks + page.v_bank, page.v, len(where))),
    )


def _patterns(memory: Tensor, addresses: Tensor, side: Side, number: int) -> Tensor | None:
    return gather(memory, addresses, side.bank_nbytes).expand(number, -1) if side.bank_nbytes else None


def even_runs(steps: list[Step]) -> list[list[Step]]:
    """Splits steps into runs in which all offsets grow evenly, so that the sides of a run are strided views."""
    runs: list[list[Step]] = []
    for step in steps:
        run = runs[-1] if runs else []
        growth = _growth(run[-1], step) if run else ()
        # Views cannot have negative strides.
        if (len(run) == 1 and min(growth) >= 0) or (len(run) > 1 and growth == _growth(run[0], run[1])):
            run.append(step)
        else:
            runs.append([step])
    return runs


def _growth(a: Step, b: Step) -> tuple[int, ...]:
    flat = zip((*a.source, *a.target, a.bank), (*b.source, *b.target, b.bank), strict=True)
    return tuple(y - x for x, y in flat)


def run_rows(memory: Tensor, src: int, dst: int, run: list[Step], old: Side, new: Side) -> tuple[SideBytes, SideBytes]:
    """The sides of a run in the blocks at ``src`` and ``dst`` as views of the arena."""
    growth = _growth(run[0], run[1]) if len(run) > 1 else (0, 0, 0, 0, 0)
    return (
        _views(memory, src, run[0].source, growth[:2], len(run), old),
        _views(memory, dst, run[0].target, growth[2:4], len(run), new),
    )


def run_bank(memory: Tensor, address: int, run: list[Step], new: Side) -> Tensor:
    """The patterns of a run's sides ``new`` in the bank at that address, a view [n, bank_nbytes] uint8."""
    growth = run[1].bank - run[0].bank if len(run) > 1 else 0
    return memory.as_strided((len(run), new.bank_nbytes), (growth, 1), address + run[0].bank)


def block_bank(
    memory: Tensor, banks: Tensor | None, num_windows: Tensor | None, index: int, run: list[Step], new: Side
) -> Tensor | None:
    """The patterns that block ``index`` may choose from for the sides of a run, a view; ``None`` for sides without."""
    if banks is None or not new.bank_nbytes:
        return None
    visible = new.visible_nbytes(0 if num_windows is None else int(num_windows[index]))
    return run_bank(memory, int(banks[index]), run, new)[:, :visible]


def _views(memory: Tensor, address: int, place: Place, growth: tuple[int, ...], number: int, side: Side) -> SideBytes:
    sizes = (side.codes_nbytes, side.meta_nbytes)
    return SideBytes(
        *(
            memory.as_strided((number, nbytes), (step, 1), address + offset)
            for offset, nbytes, step in zip(place, sizes, growth, strict=True)
        )
    )
