"""Warnings of the engine's logger, collected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The texts of warnings that are logged in the block."""
    told = list[str]()

    class _Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, keeper = logging.getLogger("qkv_engine"), _Keeper(logging.WARNING)
    logger.addHandler(keeper)
    try:
        yield told
    finally:
        logger.removeHandler(keeper)
