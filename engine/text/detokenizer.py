"""Streams a request's text as its tokens arrive, and finds its stop strings.

End-of-sequence tokens are the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .tokenizer import Tokenizer


class Detokenizer:
    """Text of one request. The deltas, joined, are the decoded output up to the first stop string.

    First means the match that is complete earliest, and of those the longest: a rule that does not depend on
    how the text is cut into tokens. Text that may turn out to begin a stop string is held back. As in vLLM a
    match counts only if it is completed by a token after the first ``min_tokens``.
    """

    __slots__ = ("_held", "_includes_stop", "_matcher", "_node", "_num_pending", "_stream", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
    ):
        """``prompt_ids`` are context, not text to emit: after a prompt a leading space is kept."""
        self.stopped: str | None = None  # the stop string that ended the text
        self._stream = tokenizer.text_stream(skip_special_tokens, prompt_ids)
        self._matcher = _build_matcher(tuple(stop)) if stop else None
        self._includes_stop = include_stop_str_in_output
        self._num_pending = min_tokens
        self._node = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; empty once a stop string was found."""
        if self.stopped is not None:
            return ""
        text = self._stream.push(token_id)
        if self._matcher is None:
            return text
        if self._num_pending:
            self._num_pending -= 1
            return self._release(text, may_stop=False)
        return self._release(text, may_stop=True) if text else ""

    def finish(self) -> str:
        """The rest of the text; it may still hold a stop string."""
        if self.stopped is not None:
            return ""
        text = self._stream.finish()
        if self._matcher is None:
            return text
        released = self._release(text, may_stop=not self._num_pending)
        if self.stopped is None:
            released, self._held = released + self._held, ""
        return released

    def _release(self, text: str, may_stop: bool) -> str:
        """Feeds the matcher; returns all text but a tail that may begin a stop string."""
        assert self._matcher is not None
        known = self._held + text
        self._node, stop, end = self._matcher.advance(self._node, text, may_stop)
        if stop is not None:
            self.stopped = stop
            end += len(self._held)
            return known[: end if self._includes_stop else end - len(stop)]
        cut = len(known) - self._matcher.depth[self._node]
        self._held = known[cut:]
        return known[:cut]


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
