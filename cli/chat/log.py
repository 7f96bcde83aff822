"""The log while a reply is drawn: its lines wait until the screen has a place for them."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class HeldLog(logging.Handler):
    """Log lines in order of arrival. Whoever draws the screen takes them.

    The engine's thread must never wait for the one that draws, which Ctrl-C may end anywhere: so they share a
    queue and no lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque()

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep one record for the screen; unlike a handler's ``emit``, without the handler's lock."""
        self._lines.append(self.format(record))
        return True

    def take(self) -> list[str]:
        """The lines since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


@contextmanager
def held_log() -> Iterator[HeldLog]:
    """The package's log, held until the block ends; lines that nobody took go to stderr then.

    A log that goes to a file is in nobody's way, and goes on to do so.
    """
    logger = logging.getLogger("qkv_engine")
    before, held = logger.handlers[:], HeldLog()
    if not sys.stderr.isatty():
        yield held
        return
    held.setFormatter(before[0].formatter if before else None)
    logger.handlers[:] = [held]
    try:
        yield held
    finally:
        logger.handlers[:] = before
        for line in held.take():
            print(line, file=sys.stderr)
