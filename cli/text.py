"""Model text on its way to the reader: control characters removed, thinking told apart from the answer."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_OPEN, _CLOSE = "<think>", "</think>"


def sanitize(text: str) -> str:
    """``text`` without C0 and C1 control characters except newline and tab: no terminal escape survives."""
    return _CONTROLS.sub("", text)


def one_line(text: str) -> str:
    """``text`` fit for one line of a log or an error message."""
    return " ".join(sanitize(text).split())


class Part(enum.Enum):
    THINKING = enum.auto()
    ANSWER = enum.auto()


class Piece(NamedTuple):
    part: Part
    text: str


class _State(enum.Enum):
    START = enum.auto()  # only white space so far: a think block may still open
    THINKING = enum.auto()
    ANSWER = enum.auto()


class ReplySplitter:
    """Splits one streamed reply into thinking and answer, however the text is cut into deltas.

    ``<think>`` opens a block only where an answer has not begun, so prose may mention the tag. ``drop`` are
    strings never shown, such as the end-of-turn token; ``thinking=True``: the prompt ended in ``<think>``.
    """

    def __init__(self, drop: Iterable[str] = (), *, thinking: bool = False):
        drop = tuple(drop)
        self._tags = {_State.THINKING: _Tags((*drop, _CLOSE)), _State.ANSWER: _Tags(drop)}
        self._state = _State.THINKING if thinking else _State.START
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether a think block is open."""
        return self._state is _State.THINKING

    def feed(self, delta: str) -> list[Piece]:
        """The pieces that ``delta`` completes; what might be the beginning of a tag is held back."""
        self._held += delta
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back and turned out to be ordinary text."""
        text, self._held = self._held, ""
        return [self._piece(text)] if text.strip() or (text and self._state is not _State.START) else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take one bite of the held text; False when nothing more can be decided."""
        if self._state is _State.START:
            return self._open()
        text, tag, rest = self._tags[self._state].cut(self._held)
        if text:
            pieces.append(self._piece(text))
        self._held = rest
        if tag == _CLOSE and self.thinking:
            self._state = _State.START
        return bool(tag)

    def _open(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held or (_OPEN.startswith(self._held) and self._held != _OPEN):
            return False
        if self._held.startswith(_OPEN):
            self._held = self._held.removeprefix(_OPEN)
            self._state = _State.THINKING
        else:
            self._state = _State.ANSWER
        return True

    def _piece(self, text: str) -> Piece:
        return Piece(Part.THINKING if self.thinking else Part.ANSWER, text)


class _Tags:
    """A few strings to look for in text that comes in pieces."""

    def __init__(self, tags: Iterable[str]):
        found = sorted(filter(None, tags), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found)) or "(?!)")
        self._beginnings = {tag[:n] for tag in found for n in range(1, len(tag))}
        self._longest = max(map(len, found), default=0)

    def cut(self, text: str) -> tuple[str, str, str]:
        """Split at the first tag; without one, keep back an end that may grow into a tag."""
        if match := self._pattern.search(text):
            return text[: match.start()], match[0], text[match.end() :]
        lengths = range(min(self._longest, len(text)), 0, -1)
        held = next((n for n in lengths if text[-n:] in self._beginnings), 0)
        return text[: len(text) - held], "", text[len(text) - held :]
