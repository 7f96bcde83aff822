"""The disk as the books see it: pieces of host memory that are written to files in the background, and read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from .host_piece import HostPiece


class DiskJob(Protocol):
    """A piece of host memory on its way to the disk, or from there."""

    @property
    def is_over(self) -> bool:
        """Whether the disk neither reads nor writes the piece's bytes any more."""
        ...

    @property
    def has_come(self) -> bool:
        """Whether all bytes were read well, once it is over; of a piece that is written always false."""
        ...

    @property
    def is_overdue(self) -> bool:
        """Whether it takes so long that nobody should wait for it."""
        ...


class Disk(Protocol):
    """Files of pieces, found by the keys of the prefix cache. Nothing here raises, and only ``wait`` waits."""

    @property
    def can_write(self) -> bool:
        """Whether pieces are taken to be written."""
        ...

    def rungs(self, key: bytes) -> Mapping[int, int]:
        """The rungs by group of what is stored of the piece of ``key``; nothing if there is none."""
        ...

    def lacks(self, key: bytes, rungs: Mapping[int, int]) -> bool:
        """Whether a piece on these ``rungs`` would be written: none is stored, or one that is worth less."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may wait to be written."""
        ...

    def write(self, piece: HostPiece) -> DiskJob:
        """Has the copies that ``piece`` has now written; their bytes stay until the job is over."""
        ...

    def read(self, piece: HostPiece) -> DiskJob:
        """Has the copies of ``piece`` filled with what is stored on their rungs."""
        ...

    def forget(self, key: bytes) -> None:
        """Has the piece of ``key`` found no more, not after a restart either, nor one that is being written."""
        ...

    def let_age(self, key: bytes) -> None:
        """Has the piece of ``key`` given up as if nobody had ever used it."""
        ...

    def wait(self, seconds: float) -> bool:
        """Waits until some job is over, at most so long; whether it is time to look at what has come of more."""
        ...


class DiskStats(NamedTuple):
    """Pieces and bytes between host memory and disk since the counters were reset.

    ``num_lost``: pieces that host memory gave up before they were written. ``num_failed``: that could not be read.
    """

    read_tokens: int = 0
    num_lost: int = 0
    num_failed: int = 0
