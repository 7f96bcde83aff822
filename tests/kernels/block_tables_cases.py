"""Run by test_block_tables.py under Triton's interpreter: device tables and the plan made from them.

Figures are numbers of differences from the references.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qkv_engine.kernels.block_tables import RUNG_BITS, BlockWords, input_nwords, pack_input, pack_tokens
from qkv_engine.kernels.block_tables.reference import entry_words_reference, place_reference, update_reference
from qkv_engine.kernels.block_tables.triton import entry_words_triton, place_triton, update_triton
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork, block_positions
from qkv_engine.kernels.paged_decode.plan_triton import plan_decode
from qkv_engine.kernels.paged_decode.split import Bounds
from studies.kernels.token_rows import token_rows

from .interpreted import report

T, ROW_NBYTES = 128, 32


def make_tables(sink: int, num_rows: int, width: int, num_rungs: int) -> BlockWords:
    """Tables whose every entry names another block, on random rungs."""
    numbers = torch.randperm(num_rows * width)
    rungs = torch.randint(num_rungs, (num_rows * width,))
    words = torch.randperm(num_rows * width) * 4096 << RUNG_BITS | rungs
    if sink:
        words[numbers.view(num_rows, width)[:, 0]] &= -1 << RUNG_BITS
    return BlockWords(torch.cat((words, numbers)), num_rows * width, width, sink, T)


def updates(count: int) -> float:
    tables, others = make_tables(0, 3, 5, 2), make_tables(0, 3, 5, 2)
    others.words.copy_(tables.words)
    pairs = list(zip(torch.randperm(30)[:count].tolist(), torch.randint(1 << 60, (count,)).tolist(), strict=True))
    step_input = torch.full((input_nwords(2),), -(1 << 62))
    words = pack_input(pack_tokens([1, 2], [3, 4], [0, 1]), pairs)
    step_input[: input_nwords(2, count)] = torch.frombuffer(words, dtype=torch.int64)
    update_triton(tables, step_input, 2)
    update_reference(others, step_input, 2)
    return float((tables.words != others.words).sum())


def places(sink: int, num_tokens: int, advance: int = 0) -> float:
    tables = make_tables(sink, 7, 9, 3)
    positions = torch.randint(-1, 8 * T - advance, (num_tokens,)).tolist()
    ids = torch.randint(-1, 50, (num_tokens,)).tolist()
    rows = torch.randint(7, (num_tokens,)).tolist()
    words = pack_input(pack_tokens(ids, positions, rows), [], advance)
    step_input = torch.frombuffer(words, dtype=torch.int64).to(tables.words.device)
    last_tokens = torch.arange(7) + 1000
    found = place_triton(tables, step_input, num_tokens, last_tokens, ROW_NBYTES)
    want = place_reference(tables, step_input, num_tokens, last_tokens, ROW_NBYTES)
    positions = [p + advance if p >= 0 else p for p in positions]
    addresses = tables.words[tables.words[63:].view(7, 9)] >> RUNG_BITS
    rows_of = token_rows(
        addresses, want.rows, torch.tensor(positions), sink_tokens=sink, block_tokens=T, row_nbytes=ROW_NBYTES
    )
    known = want.token_rows[:, 0] >= 0
    wrong = (want.token_rows != rows_of)[known].sum() + (known != (rows_of[:, 0] >= 0)).sum()
    for name in ("input_ids", "positions", "rows", "lengths"):
        wrong += (getattr(found, name) != getattr(want, name)).sum()
    wrong += (found.token_rows[:, 0] != want.token_rows[:, 0]).sum()
    return float(wrong + (found.token_rows != want.token_rows)[known].sum())


def entry_words(num_rows: int, first: int, number: int) -> float:
    tables = make_tables(0, 7, 9, 3)
    rows = torch.randint(7, (num_rows,))
    found, want = (give(tables, rows, first, number) for give in (entry_words_triton, entry_words_reference))
    columns = tables.words[63:].view(7, 9)[rows, first : first + number]
    return float((found != want).sum() + (tables.words[columns] != want.T).sum())


def plan(sink: int, batch: int, num_rungs: int, split: int, has_bank: bool = False, window: int | None = None) -> float:
    """Items, parts, sorted blocks and banks against ``DecodeWork.build``, with empty requests among the others."""
    width = 40
    tables = make_tables(sink, batch + 1, width, num_rungs)
    rows = torch.randperm(batch + 1)[:batch]
    lengths = torch.randint((width - 1) * T, (batch,)) * (torch.rand(batch) > 0.3)
    blocks = -(-(lengths - sink).clamp(min=0) // T) + (lengths > 0) * (sink > 0)
    words = tables.words[tables.words[tables.num_numbers :].view(-1, width)[rows]]
    exists = torch.arange(width) < blocks[:, None]
    rungs = torch.where(exists, words & (1 << RUNG_BITS) - 1, ABSENT)
    tables = replace(tables, has_bank=has_bank)
    if window is not None:  # blocks before it are gone
        exists &= block_positions(torch.arange(1, width + 1), sink, T) > (lengths - window)[:, None]
        numbers = tables.words[tables.num_numbers :].view(-1, width)
        numbers[rows] = torch.where(exists | (torch.arange(width) == width - 1), numbers[rows], 1 << 40)
    want = DecodeWork.build(
        words >> RUNG_BITS,
        rungs,
        lengths,
        num_rungs=num_rungs,
        item_blocks=split,
        sink_tokens=sink,
        block_tokens=T,
        banks=words[:, -1] >> RUNG_BITS if has_bank else None,
        window=window,
    )
    spare = Bounds(want.bounds.first + 70, want.bounds.others + 3)
    step_input = torch.frombuffer(
        pack_input(pack_tokens((), (), ()), [], item_blocks=1 if window else split), dtype=torch.int64
    ).to(rows.device)
    own = {} if window is None else {"window": window, "item_blocks": split}
    found = plan_decode(tables, step_input, rows, lengths.int(), num_rungs, spare, **own)
    wrong = sum((getattr(found, name) != getattr(want, name)).sum() for name in ("item_first", "part_first", "lengths"))
    num_items = want.bounds.num_items
    wrong += (found.items[:num_items] != want.items).sum() + (len(found.items) != num_items + 73)
    if want.banks is not None and found.banks is not None:
        wrong += (found.banks != want.banks).sum()
    wrong += (want.banks is None) != (found.banks is None)
    for name in ("addresses", "positions"):
        mine, theirs = (getattr(work, name).view(batch, width) for work in (found, want))
        wrong += (mine != theirs)[torch.arange(width) < exists.sum(1)[:, None]].sum()
    return float(wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    report(
        {
            "no update": lambda: updates(0),
            "every word updated": lambda: updates(30),
            "one token": lambda: places(0, 1),
            "tokens of several programs": lambda: places(0, 300),
            "tokens with a sink": lambda: places(32, 200),
            "tokens in a sink of one": lambda: places(1, 60),
            "tokens further on": lambda: places(32, 200, 37),
            "words of an entry": lambda: entry_words(1, 8, 1),
            "words of entries of several programs": lambda: entry_words(33, 2, 5),
            "plan of one rung": lambda: plan(0, 5, 1, 4),
            "plan of three rungs": lambda: plan(0, 6, 3, 2),
            "plan of twelve rungs": lambda: plan(32, 11, 12, 2),
            "plan with a sink": lambda: plan(32, 3, 3, 16),
            "plan with banks": lambda: plan(32, 5, 3, 16, has_bank=True),
            "plan of a window": lambda: plan(0, 9, 3, 2, window=300),
            "plan of a window, sink": lambda: plan(32, 9, 3, 4, has_bank=True, window=1000),
            "plan of a window of a token": lambda: plan(32, 9, 2, 1, window=1),
            "plan of one request": lambda: plan(0, 1, 2, 16),
            "plan of many requests": lambda: plan(16, 150, 2, 16),
        }
    )
