"""Text that comes piece by piece, and readers of it: generators that wait, by a ``yield``, for more.

Every character is looked at a bounded number of times, and none is held back but the beginning of a possible mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], None]
MAX_NAME_CHARS = 256  # of a tool, or of one of its arguments
SPACE = re.compile(r"\s+")


class Unreadable(Exception):
    """The text is not what a call would have here. What is wrong was not read yet."""


class Delimiters:
    """Strings of which the first is looked for."""

    def __init__(self, *texts: str):
        self._pattern = re.compile("|".join(re.escape(text) for text in texts))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, texts))

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """The first mark behind ``start``."""
        return self._pattern.search(text, start)

    def overlap(self, text: str, start: int) -> int:
        """Characters at the end of ``text`` behind ``start`` with which a mark may begin."""
        longest = min(self._longest - 1, len(text) - start)
        return next((n for n in range(longest, 0, -1) if text[len(text) - n :] in self._beginnings), 0)


class Source:
    """The text so far, and how much of it was read."""

    def __init__(self) -> None:
        self._text, self._at, self._is_last = "", 0, False
        self._recorded: list[str] | None = None
        self._recorded_from = 0

    def add(self, text: str, *, is_last: bool) -> None:
        """Adds what is new; ``is_last``: nothing more will come."""
        if self._recorded is not None:
            self._recorded.append(self._text[self._recorded_from : self._at])
        self._text = self._text[self._at :] + text
        self._at = self._recorded_from = 0
        self._is_last = is_last

    # ---- what was read, for a call that turns out to be none

    def record(self, before: str = "") -> None:
        """Keeps what is read from here on, behind ``before``."""
        self._recorded, self._recorded_from = [before], self._at

    def forget(self) -> None:
        """Keeps it no longer: it is a call."""
        self._recorded = None

    def recorded(self) -> str:
        """What was read since ``record``, "" if it was forgotten, and no longer kept."""
        pieces, self._recorded = self._recorded, None
        return "" if pieces is None else "".join([*pieces, self._text[self._recorded_from : self._at]])

    # ---- readers

    def peek(self) -> Reading[str]:
        """The next character, which is not read; "" at the end of the text."""
        while self._at >= len(self._text):
            if self._is_last:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> None:
        """Reads the character that ``peek`` has shown."""
        self._at += 1

    def expect(self, text: str) -> Reading[None]:
        """Reads exactly ``text``. Raises ``Unreadable``."""
        for char in text:
            if (yield from self.peek()) != char:
                raise Unreadable
            self._at += 1

    def expect_one_of(self, chars: str) -> Reading[str]:
        """Reads one of ``chars``. Raises ``Unreadable``."""
        char = yield from self.peek()
        if not char or char not in chars:
            raise Unreadable
        self._at += 1
        return char

    def takes(self, text: str) -> Reading[bool]:
        """Whether the text goes on with ``text``, which is read then."""
        while True:
            found = self._text[self._at : self._at + len(text)]
            if found == text:
                self._at += len(text)
                return True
            if self._is_last or not text.startswith(found):
                return False
            yield

    def space(self) -> Reading[None]:
        """Reads white space, if there is some."""
        yield from self.run(SPACE, lambda text: None)

    def run(self, pattern: re.Pattern[str], emit: Emit) -> Reading[None]:
        """Hands over as many characters as ``pattern``, one or more of a class, takes."""
        while (yield from self.peek()) and (found := pattern.match(self._text, self._at)):
            emit(found[0])
            self._at = found.end()

    def word(self, pattern: re.Pattern[str], most: int = MAX_NAME_CHARS) -> Reading[str]:
        """Such a run of 1 to ``most`` characters. Raises ``Unreadable``."""
        word = ""
        while (yield from self.peek()) and (found := pattern.match(self._text, self._at)):
            word += found[0][: most + 1]
            if len(word) > most:
                raise Unreadable
            self._at = found.end()
        if not word:
            raise Unreadable
        return word

    def until(self, marks: Delimiters, emit: Emit) -> Reading[str | None]:
        """Hands over the text before the first of ``marks``, which is read and returned; None for the end of all."""
        while (found := marks.search(self._text, self._at)) is None:
            held = 0 if self._is_last else marks.overlap(self._text, self._at)
            end = len(self._text) - held
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if self._is_last:
                return None
            yield
        if found.start() > self._at:
            emit(self._text[self._at : found.start()])
        self._at = found.end()
        return found[0]

    def rest(self, emit: Emit) -> Reading[None]:
        """Hands over all that comes."""
        while (yield from self.peek()):
            emit(self._text[self._at :])
            self._at = len(self._text)
