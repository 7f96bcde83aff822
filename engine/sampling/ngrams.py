"""Runs of tokens that a request has had, for ``no_repeat_ngram_size``."""

from __future__ import annotations

from collections.abc import Collection


class Ngrams:
    """The runs of ``size`` tokens in one request, prompt and output; only grows, like the request."""

    __slots__ = ("_followers", "_num_before", "_num_seen")

    def __init__(self, size: int):
        self._num_before = size - 1
        self._num_seen = 0
        self._followers: dict[tuple[int, ...], set[int]] = {}  # last tokens of runs, by those before them

    def last_tokens(self, token_ids: list[int]) -> Collection[int]:
        """The tokens that would make the last ones a run there has been; ``token_ids`` only grow between calls."""
        before = self._num_before
        for end in range(max(self._num_seen, before), len(token_ids)):
            self._followers.setdefault(tuple(token_ids[end - before : end]), set()).add(token_ids[end])
        self._num_seen = len(token_ids)
        return self._followers.get(tuple(token_ids[len(token_ids) - before :]), ()) if self._num_seen >= before else ()
