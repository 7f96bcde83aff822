"""Reads go first: somebody waits for them, nobody for a write, and a disk that does both does each slower."""

from __future__ import annotations

import time
from threading import Condition


class ReadsFirst:
    """Holds writes back while reads are under way. All methods may be called from any thread."""

    def __init__(self, most_seconds: float):
        """``most_seconds``: that writes are held back while reads follow each other without a gap."""
        self._most_seconds, self._until = most_seconds, 0.0
        self._changed, self._number, self._is_closed = Condition(), 0, False

    def begin(self) -> None:
        """Notes a read that is asked for."""
        with self._changed:
            if not self._number:
                self._until = time.monotonic() + self._most_seconds
            self._number += 1

    def end(self) -> None:
        """Notes the end of one."""
        with self._changed:
            self._number -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Holds nothing back any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until no read is under way, or writes were held back for long enough."""
        with self._changed:
            while self._number and not self._is_closed and (left := self._until - time.monotonic()) > 0:
                self._changed.wait(left)
