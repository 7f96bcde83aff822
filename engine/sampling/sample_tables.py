"""The sampler's tables: settings and edits of a step's rows, brought to the device in one copy."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from qkv_engine.device.pinned import to_device
from qkv_engine.kernels.sample import UNSEEN, Edits, Settings

from .sample_row import SampleRow

Piece: TypeAlias = "bytes | array[int] | array[float]"  # of a column


def make_tables(rows: Sequence[SampleRow], device: torch.device) -> tuple[Settings | None, Edits | None]:
    """Settings if any row is not greedy, edits if any row has some."""
    for row in rows:
        if row.guide is not None:
            row.follow_guide()
    parts: list[Sequence[Piece]] = []
    is_drawn = not all(row.params.is_greedy for row in rows)
    if is_drawn:
        positions = array("q", [row.position for row in rows])
        parts.append([row.settings for row in rows])
        parts.append([positions])
    entries = _Entries(rows) if any(row.is_edited for row in rows) else None
    if entries is not None and entries.ends[-1]:
        parts.extend(entries.parts)
    else:
        entries = None
    if not parts:
        return None, None
    tensors = _copy(parts, device)
    settings = edits = None
    if is_drawn:
        limited = any(row.params.top_k > 0 or row.params.top_p < 1 for row in rows)
        settings = Settings(tensors[0].view(torch.int64).view(len(rows), -1), tensors[1].view(torch.int64), limited)
    if entries is not None:
        penalties, *columns, biases = tensors[-5:]
        row_index, tokens, counts = (column.view(torch.int32) for column in columns)
        penalties = penalties.view(torch.float32).view(-1, 4)
        edits = Edits(penalties, row_index, tokens, counts, biases.view(torch.float32), entries.ends)
    return settings, edits


class _Entries:
    """The columns of ``Edits`` as bytes: fixed entries of all rows, then their penalties, then their bans."""

    def __init__(self, rows: Sequence[SampleRow]):
        self._num_entries = 0
        self._rows, self._tokens, self._counts, self._biases = (list[Piece]() for _ in range(4))
        edited = [(i, row) for i, row in enumerate(rows) if row.is_edited]
        for i, row in edited:
            size = len(row.fixed_ids)
            self._add(i, row.fixed_ids, array("i", [UNSEEN]) * size, row.fixed_biases)
        fixed = self._num_entries
        for i, row in edited:
            if row.counts is not None:
                row.counts.update(row.token_ids, row.num_prompt_tokens)
                self._add(i, row.counts.ids, row.counts.counts, array("f", [0.0]) * len(row.counts.ids))
        penalized = self._num_entries
        for i, row in edited:
            banned = row.banned_ids()
            self._add(i, banned, array("i", [UNSEEN]) * len(banned), array("f", [-math.inf]) * len(banned))
        self.ends = fixed, penalized, self._num_entries
        penalties: list[Piece] = [row.penalties for row in rows]
        self.parts = [penalties, self._rows, self._tokens, self._counts, self._biases]

    def _add(self, row: int, tokens: array[int], counts: array[int], biases: array[float]) -> None:
        """Notes the pieces of the columns, which are copied once, when all are known."""
        self._num_entries += len(tokens)
        self._rows.append(array("i", [row]) * len(tokens))
        self._tokens.append(tokens)
        self._counts.append(counts)
        self._biases.append(biases)


def _copy(parts: Sequence[Sequence[Piece]], device: torch.device) -> list[Tensor]:
    """Each part, its pieces joined, as a uint8 tensor on the device, aligned to 16 bytes; all travel in one copy."""
    spans, pieces, size = list[slice](), list[Piece](), 0
    for part in parts:
        joined = b"".join(part)
        spans.append(slice(size, size + len(joined)))
        pieces += [joined, bytes(-len(joined) % 16)]
        size += len(joined) + -len(joined) % 16
    tensor = to_device(torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8), device)
    return [tensor[span] for span in spans]
