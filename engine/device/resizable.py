"""KV memory that may be given back in part: one range of addresses for life, with a hole where nothing is held."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor


class KVMemory(Protocol):
    """Memory of one tensor."""

    @property
    def tensor(self) -> Tensor:
        """All addresses [nbytes] uint8, undefined at first; those of a hole must not be touched."""

    def dig(self, start: int, end: int) -> None:
        """Holds memory at all addresses but ``start`` to ``end``, whole chunks, whose contents are lost.

        Waits for what is under way there. Raises ``CapacityError``, and changes nothing, if the system lacks memory.
        """


class FixedMemory:
    """Memory that is held for life."""

    def __init__(self, nbytes: int, device: torch.device):
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def dig(self, start: int, end: int) -> None:
        """Nothing: an engine on such memory refuses other sizes before."""


class CpuMemory:
    """Memory of the CPU, of which the system takes back pages."""

    def __init__(self, nbytes: int):
        # Private: pages of shared memory would stay with its file.
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def dig(self, start: int, end: int) -> None:
        """Gives the pages of the hole back; others come anew when they are written."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def is_fixed(memory: KVMemory) -> bool:
    """Whether no part of ``memory`` can be given back."""
    return isinstance(memory, FixedMemory)
