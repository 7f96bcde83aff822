"""The time that decoding JSON takes, told from its counts: while it is decoded, no other thread of Python runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from .errors import ApiError

MAX_SECONDS = 0.025  # of decoding a body: more would keep everybody's tokens waiting
PIECE = 1 << 16  # bytes that are counted at once: other threads run in between
_NO_PARTS = bytes(set(range(256)) - set(b"[{"))
_NO_BACKSLASH = re.compile(rb"[^\\]")
_LONG_EXPONENT = re.compile(rb"[eE](?<=[0-9].)[+-]?[0-9]{3}")
_ZEROS = b"0" * 99


class Cost(NamedTuple):
    """What takes time, the seconds of each, and its number in JSON without the strings."""

    what: str
    seconds: float
    count: Callable[[bytes], int]


def _extremes(piece: bytes) -> int:
    """Numbers that may be near the largest or the smallest float, which are decoded digit by digit."""
    return len(_LONG_EXPONENT.findall(piece)) + piece.count(_ZEROS)


COSTS = (
    Cost("lists and objects", 1e-6, lambda piece: len(piece.translate(None, _NO_PARTS))),
    Cost("keys of objects", 3e-7, lambda piece: piece.count(b":")),
    Cost("values", 2e-8, lambda piece: piece.count(b",")),
    Cost("very large or small numbers", 1e-5, _extremes),
)


def decoding_time(*texts: bytes) -> float:
    """Seconds that JSON takes to be decoded, about. Raises ``ApiError`` for more than ``MAX_SECONDS``."""
    seconds = [0.0] * len(COSTS)
    for piece in chain.from_iterable(map(_outside_of_strings, texts)):
        for number, cost in enumerate(COSTS):
            seconds[number] += cost.seconds * cost.count(piece)
        if sum(seconds) > MAX_SECONDS:
            what = COSTS[seconds.index(max(seconds))].what
            raise ApiError(413, f"JSON with so many {what} takes too long to be decoded", code="request_too_large")
    return sum(seconds)


def _outside_of_strings(text: bytes) -> Iterator[bytes]:
    """What stands outside of JSON's strings, piece by piece."""
    begin, in_string = 0, False
    while begin < len(text):
        last = _NO_BACKSLASH.search(text, begin + PIECE - 1)  # no escape is cut in two
        end = last.end() if last else len(text)
        parts = text[begin:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[in_string::2])
        begin, in_string = end, in_string ^ (len(parts) % 2 == 0)
