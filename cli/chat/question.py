"""The one question of ``chat --prompt``: the option's text, what is piped into stdin, or both."""

from __future__ import annotations

import os
import select
import stat
import sys
from contextlib import suppress

from qkv_engine.errors import ConfigError

_PATIENCE = 2.0  # seconds without a word on stdin before the user is told what is waited for


def read_question(prompt: str | None) -> str | None:
    """The text of ``--prompt`` without white space around it; None where the option is not given.

    Read before a model is loaded for it in vain. Raises ``ConfigError`` if there is nothing to answer.
    """
    if prompt is None:
        return None
    parts = [sys.stdin.read()] if prompt == "-" else [prompt, _piped_text()]
    question = "\n\n".join(part for part in map(str.strip, parts) if part)
    if not question:
        raise ConfigError("nothing to answer", field="prompt", value=prompt)
    return question


def _piped_text() -> str:
    """The text of a pipe or file on stdin; empty for a terminal or the null device."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # no file behind it
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return ""
    with suppress(OSError):  # Windows waits for sockets only
        if not select.select([sys.stdin], [], [], _PATIENCE)[0]:
            print("qkv-engine: waiting for more text on stdin; without any, add </dev/null", file=sys.stderr)
    return sys.stdin.read()
