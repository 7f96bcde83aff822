"""Runs of tokens that a request has had, for ``no_repeat_ngram_size``."""

from __future__ import annotations

from array import array
from collections.abc import Collection

WORD = array("i").itemsize


class Ngrams:
    """The runs of ``size`` tokens in one request, prompt and output; only grows, like the request.

    ``prompt``: those of its prompt alone, which the completions of one prompt share; they are read and not changed.
    ``_followers`` has the last tokens of runs by those before them, as bytes: a long prompt has as many keys as tokens,
    nearly all with one follower, and Python's garbage collector would look at every tuple and set.
    """

    __slots__ = ("_followers", "_num_before", "_num_seen", "_prompt")

    def __init__(self, size: int, prompt: Ngrams | None = None):
        self._num_before = size - 1
        self._num_seen: int = 0 if prompt is None else prompt._num_seen
        self._prompt = prompt
        self._followers: dict[bytes, int | set[int]] = {}

    def read(self, token_ids: list[int]) -> None:
        """Takes the runs in; ``token_ids`` only grow between calls."""
        before = self._num_before
        first = max(self._num_seen, before)  # the end of the first new run
        words = array("i", token_ids[first - before :]).tobytes()
        for start, token_id in enumerate(token_ids[first:]):
            self._add(words[WORD * start : WORD * (start + before)], token_id)
        self._num_seen = len(token_ids)

    def last_tokens(self, token_ids: list[int]) -> Collection[int]:
        """The tokens that would make the last ones a run there has been; ``token_ids`` only grow between calls."""
        if len(token_ids) < self._num_before:
            return ()
        self.read(token_ids)
        key = array("i", token_ids[len(token_ids) - self._num_before :]).tobytes()
        own = self._after(key)
        return own if self._prompt is None else {*own, *self._prompt._after(key)}

    def _after(self, key: bytes) -> Collection[int]:
        found = self._followers.get(key, ())
        return (found,) if isinstance(found, int) else found

    def _add(self, key: bytes, token_id: int) -> None:
        known = self._followers.setdefault(key, token_id)
        if isinstance(known, set):
            known.add(token_id)
        elif known != token_id:
            self._followers[key] = {known, token_id}
