"""The error tree. Every error names what is wrong and, where there is one, the field, its value and the remedy."""

from __future__ import annotations

import reprlib
from typing import Self

MAX_VALUE_CHARS = 80  # of a value in a message: a hostile one cannot flood a log
_NONE = object()  # in place of a value that is not given


class QKVError(Exception):
    """Base of every error this package raises on purpose.

    ``field`` and ``value`` name what was wrong; ``remedy`` says what would work. All three end up in the text, around
    ``message``.
    """

    def __init__(self, message: str, *, field: str | None = None, value: object = _NONE, remedy: str | None = None):
        self.message, self.field, self.remedy = message, field, remedy
        self.value, self._given = None if value is _NONE else value, value
        shown = field if value is _NONE else f"{field}={_short(value)}"
        text = message if field is None else f"{shown}: {message}"
        super().__init__(text if remedy is None else f"{text}. {remedy}")

    def renamed(self, field: str | None) -> Self:
        """This error under another name of its field, such as that of an HTTP body."""
        return type(self)(self.message, field=field, value=self._given, remedy=self.remedy)


class ConfigError(QKVError, ValueError):
    """An engine option is out of range, unknown or contradicts another."""


class ModelError(QKVError):
    """A model folder, checkpoint, tokenizer or template cannot be loaded."""


class RequestError(QKVError, ValueError):
    """One request is invalid or failed; the engine and the other requests go on."""


class CapacityError(RequestError):
    """One request, or one configuration, can never fit in the memory it was given."""


class UnavailableError(QKVError, RuntimeError):
    """The system has no process, memory or file descriptor left for a request, which may be sent again."""


class EngineDeadError(QKVError, RuntimeError):
    """The engine was closed or its device was lost; nothing more can run on it."""


class DeviceLostError(EngineDeadError):
    """The device computes nothing any more, as after an illegal access to memory; only a new process can use it."""


class StoreError(QKVError):
    """A file of a KV store cannot be used, or no longer be written; requests go on without it."""


class RankLostError(EngineDeadError):
    """The process of a tensor-parallel rank ended, stood still, or fell out of step with the others."""


def remedy_of_extra(extra: str) -> str:
    """How to install the packages of an extra of ``pyproject.toml``; the project is on no package index yet."""
    return f"Run in a checkout of qkv-engine: pip install '.[{extra}]'"


def as_request_error(error: Exception) -> QKVError:
    """The error that the reader of a request gets when the request failed with ``error``."""
    if isinstance(error, QKVError):
        return error
    return RequestError(f"the request failed while running: {type(error).__name__}: {error}")


class _ShortRepr(reprlib.Repr):
    """``repr`` that looks at a few items, levels and characters only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 8, 8, 6
        self.maxstring = self.maxother = self.maxlong = MAX_VALUE_CHARS


def _short(value: object) -> str:
    """``value`` on one line, cut after 80 characters, in bounded time, even if its ``repr`` fails."""
    try:
        text = " ".join(_ShortRepr().repr(value).split())
    except Exception:  # an int of more digits than Python writes out, a hostile ``repr``
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
