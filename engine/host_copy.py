"""Copies to the host that it waits for when it needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.copies import PinnedWords


class HostCopy:
    """A tensor on its way to the host. On the CPU it is the tensor itself."""

    def __init__(self, source: Tensor):
        self._tensor, self._done = source, None
        if source.is_cuda:
            self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._tensor.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[Any]:
        """The tensor's elements, in nested lists. Blocks until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor.tolist()


class RowsCopy:
    """The first words of a tensor on their way to the host, as rows."""

    def __init__(self, spare: list[PinnedWords], buffer: PinnedWords, num_rows: int, width: int):
        self._spare, self._buffer, self._num_rows, self._width = spare, buffer, num_rows, width

    def wait(self) -> list[list[int]]:
        """Rows of numbers. Blocks until the copy is complete; may be called once."""
        self._buffer.wait()
        words, width = self._buffer.words, self._width
        rows = [words[i * width : (i + 1) * width].tolist() for i in range(self._num_rows)]
        self._spare.append(self._buffer)
        return rows


class HostCopies:
    """Copies of ``source`` [n] int64 as it is now and as it will be: quicker to begin than a ``HostCopy`` each."""

    def __init__(self, source: Tensor):
        self._source = source
        self._spare: list[PinnedWords] = []  # a copy that nobody waits for keeps its own

    def begin(self, num_rows: int, width: int) -> RowsCopy:
        """Enqueues a copy, of which the first ``num_rows * width`` words are wanted."""
        buffer = self._spare.pop() if self._spare else PinnedWords(self._source)
        buffer.fetch()
        return RowsCopy(self._spare, buffer, num_rows, width)
