"""Sizes of memory in words: "20GiB", "50%", a share of free memory. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable

from .errors import ConfigError

MAX_SIZE = 2**62  # bytes; anything above is a slip of the pen and would not fit the kernels' int64 addresses

# Docker's and Java's habit: G, Gi and GiB are 2^30 bytes, only GB is 10^9. Keys are in upper case, input in any.
_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    name: base**power
    for power, letter in enumerate("KMGT", 1)
    for name, base in ((letter, 1024), (f"{letter}I", 1024), (f"{letter}IB", 1024), (f"{letter}B", 1000))
}
_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_TIME = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{0,9})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
MAX_SECONDS = 30 * 86_400
_SIZE_REMEDY = 'Give bytes, a size such as "20GiB", or a share of free memory such as 0.5 or "50%"'
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19})\s*(%|[a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(size: int | str | float, *, field: str, free: int | None) -> int:
    """Bytes named by ``size``: an int (bytes), a text such as "20GiB", or a share of ``free`` bytes.

    ``free`` is None where no share can be had, since the memory is not here.

    A share is a float in (0, 1], the same as a text with a decimal point ("0.5"), or "50%". Units in any case: K, M,
    G, T, also written Ki or KiB, are powers of 1,024; KB, MB, GB, TB powers of 1,000. Raises ``ConfigError`` for
    anything else, and for sizes that are not positive or above 4 EiB.
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise ConfigError("not a size", field=field, value=size, remedy=_SIZE_REMEDY)
    number = _parse_words(size, field) if isinstance(size, str) else size
    if isinstance(number, float):
        if not 0.0 < number <= 1.0:
            raise ConfigError("a share lies in (0, 1]", field=field, value=size, remedy=_SIZE_REMEDY)
        if free is None:
            remedy = 'Give bytes, or a size such as "20GiB"'
            raise ConfigError("a share of memory that is not here", field=field, value=size, remedy=remedy)
        return max(1, int(number * free))
    if number <= 0:
        raise ConfigError("must be positive", field=field, value=size, remedy=_SIZE_REMEDY)
    if number > MAX_SIZE:
        raise ConfigError("more than any machine has", field=field, value=size, remedy=_SIZE_REMEDY)
    return number


def parse_seconds(value: object) -> float | None:
    """Seconds named by a number, or by a text such as "90s", "10min", "24h" or "7d"; at most 30 days.

    None for anything else.
    """
    if isinstance(value, str):
        match = _TIME.fullmatch(value)
        if match is None or match[2].lower() not in _SECONDS:
            return None
        value = float(match[1]) * _SECONDS[match[2].lower()]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        return None
    return float(value)


def _parse_words(text: str, field: str) -> int | float:
    """Bytes as an int, or a share as a float."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError("not a size", field=field, value=text, remedy=_SIZE_REMEDY)
    digits, unit = match[1], match[2].upper()
    if unit == "%":
        return float(digits) / 100
    if unit not in _UNITS:
        raise ConfigError("unknown unit", field=field, value=text, remedy=_SIZE_REMEDY)
    if "." not in digits:
        return int(digits) * _UNITS[unit]
    return int(float(digits) * _UNITS[unit]) if unit else float(digits)


def format_size(nbytes: float) -> str:
    """``nbytes`` in words with one decimal: 20.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def least_size(start: int, holds: Callable[[int], bool]) -> str:
    """The least bytes for which ``holds``, to a thousandth, as an option takes them. All larger sizes hold, too.

    The search begins at ``start`` bytes, above 0.
    """
    low, high = 0, start
    while not holds(high):
        low, high = high, 2 * high
    while high - low > high // 1000 + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return format_least(high).replace(" ", "")


def format_least(nbytes: int) -> str:
    """A size in words that, given as an option, is at least ``nbytes``: rounded up, never down."""
    unit = next((unit for unit in (2**40, 2**30, 2**20, 2**10) if nbytes >= unit), 1)
    return format_size(-(-nbytes * 10 // unit) * unit / 10)
