"""The sampler's tables: settings and edits of a step's rows, brought to the device in one copy."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from qkv_engine.kernels.copies import to_device
from qkv_engine.kernels.sample import UNSEEN, Edits, Settings

from .sample_row import SampleRow


def make_tables(rows: Sequence[SampleRow], device: torch.device) -> tuple[Settings | None, Edits | None]:
    """Settings if any row is not greedy, edits if any row has some."""
    parts: list[bytes] = []
    is_drawn = not all(row.params.is_greedy for row in rows)
    if is_drawn:
        positions = array("q", [row.position for row in rows])
        parts += [b"".join([row.settings for row in rows]), positions.tobytes()]
    entries = _Entries(rows) if any(row.is_edited for row in rows) else None
    if entries is not None and entries.ends[-1]:
        parts += entries.parts
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
        self._rows, self._tokens, self._counts, self._biases = array("i"), array("i"), array("i"), array("f")
        edited = [(i, row) for i, row in enumerate(rows) if row.is_edited]
        for i, row in edited:
            size = len(row.fixed_ids)
            self._add(i, row.fixed_ids, array("i", [UNSEEN]) * size, row.fixed_biases)
        fixed = len(self._rows)
        for i, row in edited:
            if row.counts is not None:
                row.counts.update(row.token_ids, row.num_prompt_tokens)
                self._add(i, row.counts.ids, row.counts.counts, array("f", [0.0]) * len(row.counts.ids))
        penalized = len(self._rows)
        for i, row in edited:
            banned = array("i", row.banned_ids())
            self._add(i, banned, array("i", [UNSEEN]) * len(banned), array("f", [-math.inf]) * len(banned))
        self.ends = fixed, penalized, len(self._rows)
        penalties = b"".join([row.penalties for row in rows])
        columns = (self._rows, self._tokens, self._counts, self._biases)
        self.parts = [penalties, *(column.tobytes() for column in columns)]

    def _add(self, row: int, tokens: array[int], counts: array[int], biases: array[float]) -> None:
        self._rows += array("i", [row]) * len(tokens)
        self._tokens += tokens
        self._counts += counts
        self._biases += biases


def _copy(parts: Sequence[bytes], device: torch.device) -> list[Tensor]:
    """Each part as a uint8 tensor on the device, aligned to 16 bytes; all of them travel in one copy."""
    starts, buffer = [], bytearray()
    for part in parts:
        starts.append(len(buffer))
        buffer += part
        buffer += bytes(-len(part) % 16)
    tensor = to_device(torch.frombuffer(buffer, dtype=torch.uint8), device)
    return [tensor[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
