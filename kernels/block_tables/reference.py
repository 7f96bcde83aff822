"""Block tables on the device, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.table_words import RUNG_BITS

from .words import HEADER, BlockWords, Placed


def update_reference(tables: BlockWords, step_input: Tensor, num_tokens: int) -> None:
    """Same contract as ``qkv_engine.kernels.block_tables.update``."""
    first = HEADER + 3 * num_tokens
    pairs = step_input[first : first + 2 * int(step_input[0])].view(-1, 2)
    tables.words[pairs[:, 0]] = pairs[:, 1]


def place_reference(
    tables: BlockWords, step_input: Tensor, num_tokens: int, last_tokens: Tensor, row_nbytes: int
) -> Placed:
    """Same contract as ``qkv_engine.kernels.block_tables.place``."""
    ids, positions, rows = step_input[HEADER : HEADER + 3 * num_tokens].view(3, -1)
    positions = torch.where(positions < 0, positions, positions + step_input[1])
    sink = tables.sink_tokens
    in_sink = positions < sink
    index = torch.where(in_sink, 0, (sink > 0) + (positions - sink) // tables.block_tokens)
    offset = torch.where(in_sink, positions, (positions - sink) % tables.block_tokens)
    entry = tables.num_numbers + rows * tables.width + index.clamp(min=0)
    address = tables.words[tables.words[entry]] >> RUNG_BITS
    row = torch.where(positions < 0, -1, address // row_nbytes + offset)
    return Placed(
        torch.where(ids < 0, last_tokens[rows], ids),
        positions.clamp(min=0),
        rows,
        (positions + 1).int(),
        torch.stack((row, torch.where(in_sink, sink, tables.block_tokens)), 1),
    )


def entry_words_reference(tables: BlockWords, rows: Tensor, first: int, number: int) -> Tensor:
    """Same contract as ``qkv_engine.kernels.block_tables.entry_words``."""
    entries = tables.num_numbers + torch.arange(first, first + number, device=rows.device)[:, None]
    return tables.words[tables.words[entries + rows * tables.width]]
