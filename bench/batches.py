"""Batch sizes and sizes in requests, as the command line words them."""

from __future__ import annotations

import re

from qkv_engine.errors import ConfigError

MAX_REQUESTS = 4096  # an engine runs no more at once
MAX = "max"  # the batch size that stands for the largest batch that fits
_PART = re.compile(r"\s*(?:(\d{1,6})\s*\.\.\s*)?(\d{1,6}|max)\s*", re.ASCII)


def parse_batches(text: str, largest: int | None = None) -> tuple[int, ...]:
    """Batch sizes of "1,2,4", of "1..64" (doubling, both ends included), or of both; repeated ones once.

    "max" stands for ``largest``, or for 1 where that is 0. Raises ``ConfigError`` for anything else, and for "max"
    without ``largest``.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        last = 0 if match is None else _size(match[2], largest)
        first = last if match is None or match[1] is None else int(match[1])
        if match is not None and match[2] == MAX:
            first = min(first, last)
        if not 1 <= first <= last:
            remedy = 'Give a list such as "1,2,4" or "8,max", or a range such as "1..64" or "1..max"'
            raise ConfigError("not batch sizes", field="batch_sweep", value=text, remedy=remedy)
        while first < last:
            sizes.append(first)
            first *= 2
        sizes.append(last)
    return tuple(dict.fromkeys(sizes))


def _size(word: str, largest: int | None) -> int:
    """The number that ``word`` is; 0 for "max" without a largest batch."""
    if word != MAX:
        return int(word)
    return 0 if largest is None else max(1, largest)


def parse_requests(size: str | None) -> int | None:
    """The number in "8x", which asks for memory in requests; None for any other size. Raises ``ConfigError``."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*x\s*", size or "", re.ASCII | re.IGNORECASE)
    if match is None:
        return None
    if not 1 <= int(match[1]) <= MAX_REQUESTS:
        remedy = f"Give from 1x to {MAX_REQUESTS}x"
        raise ConfigError("not a number of requests", field="kv_memory", value=size, remedy=remedy)
    return int(match[1])
