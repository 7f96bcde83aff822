"""Repeated asynchronous copies between host and device, through pinned buffers that are made once."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque

import torch
from torch import Tensor


class PinnedWords:
    """A pinned buffer of [n] int64 for repeated copies; buffer and event are made once.

    Always copies the whole buffer: slicing on the host costs more than a few extra KiB on the device. ``words`` are the
    elements, read and written without torch, which takes longer for a few.
    """

    def __init__(self, partner: Tensor):
        """``partner`` [n] int64: source or target of the copies, on any device."""
        self._partner = partner
        self._memory = torch.zeros(partner.shape, dtype=torch.int64, pin_memory=partner.is_cuda)
        buffer = (ctypes.c_char * self._memory.nbytes).from_address(self._memory.data_ptr())
        self.words: memoryview[int] = memoryview(buffer).cast("B").cast("q")
        self._copied = torch.cuda.Event() if partner.is_cuda else None  # type: ignore[no-untyped-call]

    def send(self) -> None:
        """Enqueues a copy to the partner."""
        self._copy(self._memory, self._partner)

    def fetch(self) -> None:
        """Enqueues a copy from the partner."""
        self._copy(self._partner, self._memory)

    @property
    def is_idle(self) -> bool:
        """Whether the last copy, if there was one, is complete."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Blocks until ``is_idle``."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class PinnedRing:
    """Repeated copies of words to ``target`` [n] int64, from as many pinned buffers as are in flight at once."""

    def __init__(self, target: Tensor):
        self._target = target
        self._buffers = deque([PinnedWords(target)])  # the oldest copy at the left

    def send(self, words: array[int]) -> None:
        """Enqueues a copy of ``words`` [m] to the first m of the target. Later words of the target are undefined."""
        if not self._buffers[0].is_idle:
            self._buffers.appendleft(PinnedWords(self._target))
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.words[: len(words)] = words
        buffer.send()


class RowsCopy:
    """An asynchronous copy of a tensor's first words to the host, as rows."""

    def __init__(self, spare: list[PinnedWords], buffer: PinnedWords, num_rows: int, width: int):
        self._spare, self._buffer, self._num_rows, self._width = spare, buffer, num_rows, width

    def wait(self) -> list[list[int]]:
        """The rows of numbers. Blocks until the copy is complete; may be called once."""
        self._buffer.wait()
        words, width = self._buffer.words, self._width
        rows = [words[i * width : (i + 1) * width].tolist() for i in range(self._num_rows)]
        self._spare.append(self._buffer)
        return rows


class HostCopies:
    """Repeated asynchronous copies of ``source`` [n] int64 to the host, which reuse their pinned buffers."""

    def __init__(self, source: Tensor):
        self._source = source
        self._spare: list[PinnedWords] = []  # a copy that is never waited for keeps its buffer

    def begin(self, num_rows: int, width: int) -> RowsCopy:
        """Enqueues a copy, whose first ``num_rows * width`` words become the rows."""
        buffer = self._spare.pop() if self._spare else PinnedWords(self._source)
        buffer.fetch()
        return RowsCopy(self._spare, buffer, num_rows, width)
