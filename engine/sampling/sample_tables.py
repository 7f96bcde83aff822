"""The sampler's tables: settings and edits of a step's rows as plain data, brought to the device in one copy."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from qkv_engine.kernels.sample import UNSEEN, Edits, Settings
from qkv_engine.kernels.to_device import to_device

from .sample_row import SampleRow

Piece: TypeAlias = "bytes | array[int] | array[float]"  # of a column


class SampleTables(msgspec.Struct, frozen=True, gc=False):
    """Settings and edits of ``num_rows`` rows to sample, of which some are not plain.

    Fields
        data: columns of settings, if ``is_drawn``, then of edits, if there are ``ends``; 16-byte aligned.
        sizes: bytes of each column.
        is_drawn: some row is not greedy.  is_limited: some row has a top_k or top_p.
        ends: as in ``Edits``.
        ranked: rows with log-probabilities, and how many of the likeliest tokens each wants.
    """

    num_rows: int
    data: bytearray
    sizes: list[int]
    is_drawn: bool
    is_limited: bool
    ends: tuple[int, int, int] | None
    ranked: list[tuple[int, int]]

    @classmethod
    def pack(cls, rows: Sequence[SampleRow]) -> SampleTables | None:
        """The tables of ``rows``; ``None`` if all are plain. They are read before this returns."""
        if all(row.is_plain for row in rows):
            return None
        for row in rows:
            if row.is_guided:
                row.follow_guide()
        columns: list[Sequence[Piece]] = []
        is_drawn = not all(row.params.is_greedy for row in rows)
        if is_drawn:
            columns.append([row.settings for row in rows])
            columns.append([array("q", [row.position for row in rows])])
        entries = _Entries(rows) if any(row.is_edited for row in rows) else None
        ends = entries.ends if entries is not None and entries.ends[-1] else None
        if entries is not None and ends is not None:
            columns.extend(entries.parts)
        joined = [b"".join(column) for column in columns]
        data = bytearray().join(piece for column in joined for piece in (column, bytes(-len(column) % 16)))
        is_limited = is_drawn and any(row.params.top_k > 0 or row.params.top_p < 1 for row in rows)
        ranked = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
        return cls(len(rows), data, [len(column) for column in joined], is_drawn, is_limited, ends, ranked)

    def on(self, device: torch.device) -> tuple[Settings | None, Edits | None]:
        """Settings if any row is not greedy, edits if any row has some."""
        if not self.sizes:
            return None, None
        tensors = self._columns(device)
        settings = edits = None
        if self.is_drawn:
            rows = tensors[0].view(torch.int64).view(self.num_rows, -1)
            settings = Settings(rows, tensors[1].view(torch.int64), self.is_limited)
        if self.ends is not None:
            penalties, *columns, biases = tensors[-5:]
            row_index, tokens, counts = (column.view(torch.int32) for column in columns)
            penalties = penalties.view(torch.float32).view(-1, 4)
            edits = Edits(penalties, row_index, tokens, counts, biases.view(torch.float32), self.ends)
        return settings, edits

    def _columns(self, device: torch.device) -> list[Tensor]:
        """Each column as a uint8 tensor on the device; all travel in one copy."""
        tensor = to_device(torch.frombuffer(self.data, dtype=torch.uint8), device)
        found, start = [], 0
        for size in self.sizes:
            found.append(tensor[start : start + size])
            start += size + -size % 16
        return found


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
