"""Text of a model or a user on its way to a terminal: control characters removed."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def sanitize(text: str) -> str:
    """``text`` without C0 and C1 control characters except newline and tab: no terminal escape survives."""
    return _CONTROLS.sub("", text)


def one_line(text: str) -> str:
    """``text`` fit for one line of a log or an error message."""
    return " ".join(sanitize(text).split())
