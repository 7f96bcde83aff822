"""Text on its way to a terminal: control characters removed, numbers of things in words."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def sanitize(text: str) -> str:
    """``text`` without C0 and C1 control characters except newline and tab: no terminal escape survives."""
    return _CONTROLS.sub("", text)


def one_line(text: str) -> str:
    """``text`` fit for one line of a log or an error message."""
    return " ".join(sanitize(text).split())


def count(number: int, noun: str) -> str:
    """A number of things, such as "1 turn" or "1,024 turns"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
