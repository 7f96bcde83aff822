"""Finds the stop strings of a text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopFinder:
    """One text on its way out, up to its first stop string.

    First means the match that is complete earliest, and of those the longest: a rule that does not depend on
    how the text is cut into pieces. Text that may turn out to begin a stop string is held back.
    """

    __slots__ = ("_held", "_includes_stop", "_matcher", "_node", "found")

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False):
        self.found: str | None = None  # the stop string that ended the text
        self._matcher = _build_matcher(tuple(stop))
        self._includes_stop = include_stop_str_in_output
        self._node = 0
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that ``text`` makes certain; empty once a stop string was found.

        Unless ``may_stop``, a match that ``text`` completes does not count.
        """
        if self.found is not None:
            return ""
        known = self._held + text
        self._node, self.found, end = self._matcher.advance(self._node, text, may_stop)
        if self.found is not None:
            end += len(self._held)
            return known[: end if self._includes_stop else end - len(self.found)]
        cut = len(known) - self._matcher.depth[self._node]
        self._held = known[cut:]
        return known[:cut]

    def finish(self) -> str:
        """What is held back, once the text has ended."""
        return self._held if self.found is None else ""


class _Matcher:
    """Aho-Corasick automaton over the stop strings; a node is the longest suffix that begins one."""

    def __init__(self, patterns: tuple[str, ...]):
        self.depth = [0]  # characters of the suffix a node stands for
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]  # longest pattern that ends here
        for pattern in patterns:
            self._insert(pattern)
        self._link()

    def _insert(self, pattern: str) -> None:
        node = 0
        for char in pattern:
            child = self._next[node].get(char)
            if child is None:
                child = self._next[node][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._match.append(None)
                self.depth.append(self.depth[node] + 1)
            node = child
        self._match[node] = pattern

    def _link(self) -> None:
        """Failure links, breadth first: a node's is known before its children's."""
        queue = list(self._next[0].values())
        for node in queue:
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def advance(self, node: int, text: str, may_stop: bool) -> tuple[int, str | None, int]:
        """Node after ``text``; or the pattern found and the length of text at which it is complete."""
        for i, char in enumerate(text):
            child = self._next[node].get(char)
            node = self._step(node, char) if child is None else child
            if may_stop and (found := self._match[node]) is not None:
                return node, found, i + 1
        return node, None, 0


@lru_cache(maxsize=64)
def _build_matcher(patterns: tuple[str, ...]) -> _Matcher:
    return _Matcher(patterns)
