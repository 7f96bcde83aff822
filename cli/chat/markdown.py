"""Cuts streamed Markdown into blocks that are finished and a tail that may still change. Draws nothing."""

from __future__ import annotations

import re

_FENCE = re.compile(r"[ \t]*(`{3,}(?=[^`]*$)|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}(\s|$)")
_LIST_ITEM = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")
_INDENTED = re.compile(r"\t| {2,}")


class MarkdownBlocks:
    """Collects streamed Markdown and hands out each block once it cannot change any more.

    Blocks joined with the tail are always the text that came in. A fence is never split, nor is a list with
    blank lines between its items, so every block renders on its own as it would within the whole.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []  # complete lines of the block in progress
        self._partial = ""  # the line still being written
        self._fence = ""  # the marker that opened the current fence
        self._is_list = False
        self._done: list[str] = []

    @property
    def tail(self) -> str:
        """The unfinished block."""
        return "".join(self._lines) + self._partial

    def preview(self, num_lines: int) -> str:
        """The unfinished block, or the last lines of a long fence, for drawing them all again takes too long."""
        start = next((number for number, line in enumerate(self._lines) if line.strip()), 0)
        if not self._fence or len(self._lines) - start <= num_lines or not _FENCE.match(self._lines[start]):
            return self.tail
        return "".join([self._lines[start], *self._lines[-num_lines:], self._partial])

    def feed(self, text: str) -> list[str]:
        """The blocks that ``text`` finishes."""
        *complete, self._partial = (self._partial + text).split("\n")
        for line in complete:
            self._add(line + "\n")
        blocks, self._done = self._done, []
        return blocks

    def finish(self) -> list[str]:
        """The blocks that are left at the end of the text."""
        if self._partial:
            line, self._partial = self._partial, ""
            self._add(line)
        self._flush()
        blocks, self._done = self._done, []
        return blocks

    def _add(self, line: str) -> None:
        if self._fence:
            self._lines.append(line)
            if _closes(line, self._fence):
                self._fence = ""
                self._flush_unless_list()
            return
        if line.strip() and self._starts_block(line):
            self._flush()
        if not self._has_text():
            self._is_list = bool(_LIST_ITEM.match(line))
        self._lines.append(line)
        if opened := _FENCE.match(line):
            self._fence = opened[1]
        elif _HEADING.match(line):
            self._flush_unless_list()

    def _starts_block(self, line: str) -> bool:
        """Whether ``line``, outside a fence and not blank, cannot belong to the block in progress."""
        if not self._has_text():
            return False
        continues = bool(_INDENTED.match(line)) or (self._is_list and bool(_LIST_ITEM.match(line)))
        if not self._lines[-1].strip():
            return not continues
        return not continues and bool(_FENCE.match(line) or _HEADING.match(line))

    def _has_text(self) -> bool:
        return any(line.strip() for line in self._lines)

    def _flush_unless_list(self) -> None:
        if not self._is_list:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._done.append("".join(self._lines))
        self._lines, self._is_list = [], False


def _closes(line: str, fence: str) -> bool:
    """Whether ``line`` is nothing but a fence of the same character, at least as long."""
    mark = line.strip()
    return len(mark) >= len(fence) and not mark.strip(fence[0])
