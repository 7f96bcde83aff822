"""A backend's copy of the block tables: words on the host, and for a GPU the same words in its memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import MAX_UPDATES, RUNG_BITS, BlockWords, pack_input, pack_tokens, update
from qkv_engine.kernels.to_device import to_device

from ..kv.spec import KVSpec
from ..kv.table_rows import Section, TableLayout


class GroupWords:
    """The words of one group's tables on the host, which ``HostTables`` keeps."""

    def __init__(self, words: array[int], section: Section, num_rows: int):
        self.section = section
        self._words = words
        # NumPy looks a few words up in a fraction of torch's time.
        self._own = np.frombuffer(words, dtype=np.int64)[section.base : section.first(num_rows + 1)]
        self._numbers = self._own[section.num_numbers :].reshape(-1, section.width)

    def entry(self, row: int, index: int) -> tuple[int, int]:
        """Address and rung of an entry of a row."""
        word = self._words[self.section.base + self._words[self.section.first(row) + index]]
        return word >> RUNG_BITS, word & (1 << RUNG_BITS) - 1

    def bank(self, row: int) -> int | None:
        """Address of a row's bank; ``None`` without patterns."""
        return self.entry(row, self.section.width - 1)[0] if self.section.has_bank else None

    def states(self, row: int) -> list[int]:
        """Words of the states of a row's request: the address of each, and how far it has stepped down."""
        first, base = self.section.first(row) + self.section.first_state, self.section.base
        return [self._words[base + number] for number in self._words[first : first + self.section.num_states]]

    def entries(self, rows: Sequence[int], num_entries: int) -> tuple[Tensor, Tensor]:
        """Addresses and rungs [B, ``num_entries``] int64 of the first entries of some rows.

        Values behind a row's last entry, and of blocks that were given back, are undefined.
        """
        found = self._own[self._numbers[list(rows), :num_entries]]
        return torch.from_numpy(found >> RUNG_BITS), torch.from_numpy(found & (1 << RUNG_BITS) - 1)

    def banks(self, rows: Sequence[int]) -> Tensor | None:
        """Addresses [B] int64 of the banks of some rows; ``None`` without patterns."""
        if not self.section.has_bank:
            return None
        return torch.from_numpy(self._own[self._numbers[list(rows), -1]] >> RUNG_BITS)


class HostTables:
    """The words of ``TableLayout`` on the host, brought up to date by the changes that ``TableRows`` gathers.

    ``groups``: the words of each group.
    """

    def __init__(self, layout: TableLayout):
        self.layout = layout
        self.words = array("q", bytes(8 * layout.num_words))
        self.groups = [GroupWords(self.words, section, layout.num_rows) for section in layout.sections]

    def apply(self, changes: Sequence[int]) -> None:
        """Sets words: index and value in turns."""
        for index, value in zip(changes[::2], changes[1::2], strict=True):
            self.words[index] = value


class DeviceTables(HostTables):
    """The same words in device memory, too, where a step's input brings the changes.

    ``block_words`` are what kernels read, by group; ``last_tokens`` [rows + 1] int64 holds the token sampled last for
    each row. ``num_blocks`` are those by group and rung, as of the last command.
    """

    def __init__(self, layout: TableLayout, spec: KVSpec, device: torch.device):
        super().__init__(layout)
        self.device = device
        words = torch.zeros(layout.num_words, dtype=torch.int64, device=device)
        # The first group's words are all there are, from its own on: updates are made through them.
        self.block_words = [
            BlockWords(words[s.base :], s.num_numbers, s.width, spec.sink, spec.block_tokens, s.has_bank)
            for s in layout.sections
        ]
        self.last_tokens = torch.zeros(layout.num_rows + 1, dtype=torch.int64, device=device)
        self.spare_row = layout.spare_row
        self.num_blocks: list[list[int]] = []
        self._changed: list[int] = []  # indices of words not yet sent to the device

    def apply(self, changes: Sequence[int]) -> None:
        """Sets words on the host; the next inputs bring them to the device."""
        super().apply(changes)
        self._changed += changes[::2]

    def step_input(self, tokens: array[int], advance: int = 0, item_blocks: int = 1) -> array[int]:
        """A step's input for ``tokens``, with as many updates as it may carry; see ``pack_input``.

        Updates beyond that number are sent at once, in inputs of their own.
        """
        while len(self._changed) > MAX_UPDATES:
            self._flush()
        updates = [(index, self.words[index]) for index in self._changed]
        self._changed.clear()
        return pack_input(tokens, updates, advance, item_blocks)

    def _flush(self) -> None:
        """Sends the first ``MAX_UPDATES`` updates."""
        later = self._changed[MAX_UPDATES:]
        del self._changed[MAX_UPDATES:]
        step_input = torch.frombuffer(self.step_input(pack_tokens((), (), ())), dtype=torch.int64)
        update(self.block_words[0], to_device(step_input, self.device), 0)
        self._changed = later
