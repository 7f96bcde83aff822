"""Sampling state of one request: its settings, packed once, and the edits of logits that its tokens call for."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from qkv_engine.kernels.sample import pack_settings

from ..request import SamplingParams
from .allowed_tokens import AllowedTokens
from .guide import Guide, as_array, indices
from .ngrams import Ngrams


class TokenCounts:
    """Distinct token ids of one request and how often each was generated; only grows, like the request."""

    __slots__ = ("_num_seen", "_slot_of", "counts", "ids")

    def __init__(self) -> None:
        self.ids, self.counts = array("i"), array("i")
        self._num_seen = 0
        self._slot_of: dict[int, int] = {}

    def update(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        for position in range(self._num_seen, len(token_ids)):
            token_id = token_ids[position]
            slot = self._slot_of.get(token_id)
            if slot is None:
                slot = self._slot_of[token_id] = len(self.ids)
                self.ids.append(token_id)
                self.counts.append(0)
            if position >= num_prompt_tokens:
                self.counts[slot] += 1
        self._num_seen = len(token_ids)


@dataclass(slots=True, eq=False)
class SampleRow:
    """Sampling state of one request, made when it starts and dropped when it ends.

    ``token_ids`` is the request's own list (prompt, then output) and is read, never copied. ``stop_ids``
    (end of sequence and stop_token_ids) are suppressed until ``min_tokens`` are out. ``bad_word_ids`` are
    the tokenized ``bad_words``.
    """

    params: SamplingParams
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    stop_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    guide: Guide | None = None  # of structured outputs
    chooser: AllowedTokens | None = None
    prompt_ngrams: Ngrams | None = None  # with ``no_repeat_ngram_size``, of what completions of one prompt share
    num_in_flight: int = 0  # sampled tokens that ``token_ids`` does not have yet; 0 with ``needs_tokens``
    settings: bytes = field(init=False)
    penalties: bytes = field(init=False)  # repetition, frequency, presence, whether only allowed tokens stay
    fixed_ids: array[int] = field(init=False)  # tokens with a bias, which are the allowed ones where only these stay
    fixed_biases: array[float] = field(init=False)
    _guide_bans: array[int] = field(init=False)  # tokens that the guide excludes in this step
    _stops: array[int] = field(init=False)  # ``stop_ids``, each once
    _bad_tokens: array[int] = field(init=False)  # bad words of one token
    _bad_words: dict[int, list[tuple[list[int], int]]] = field(init=False)  # others, by the last token but one
    _ngrams: Ngrams | None = field(init=False)  # where none may occur twice
    counts: TokenCounts | None = field(init=False)  # where there are penalties
    is_guided: bool = field(init=False)  # ``follow_guide`` comes before each token
    is_edited: bool = field(init=False)
    is_plain: bool = field(init=False)  # greedy with nothing else to do
    needs_tokens: bool = field(init=False)  # its edits depend on the values of all tokens before

    def __post_init__(self) -> None:
        params = self.params
        self.settings = pack_settings(params.temperature, params.top_k, params.top_p, params.min_p, self.seed)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.counts = TokenCounts() if penalties != (1.0, 0.0, 0.0) else None
        self._fix(params.allowed_token_ids)
        self._guide_bans = array("i")
        size = params.no_repeat_ngram_size
        self._ngrams = Ngrams(size, self.prompt_ngrams) if size else None
        self.is_guided = self.guide is not None or self.chooser is not None
        follows = self.counts is not None or self._ngrams is not None or self.is_guided
        self.is_edited = bool(follows or self.fixed_ids or params.min_tokens or self.bad_word_ids)
        self.is_plain = params.is_greedy and not self.is_edited and params.logprobs is None
        self._stops = array("i", dict.fromkeys(self.stop_ids)) if params.min_tokens else array("i")
        self._bad_tokens = array("i", {word[0]: None for word in self.bad_word_ids if len(word) == 1})
        self._bad_words = {}
        for *prefix, last in self.bad_word_ids:
            if prefix:
                self._bad_words.setdefault(prefix[-1], []).append((prefix, last))
        self.needs_tokens = follows or bool(self._bad_words)

    @property
    def position(self) -> int:
        """Index in the output of the token to be sampled."""
        return len(self.token_ids) + self.num_in_flight - self.num_prompt_tokens

    def follow_guide(self) -> None:
        """Allows in this step what guide and chooser do: by the tokens that may come, or the guide's others if fewer.

        Raises ``RequestError`` where one of them fails.
        """
        guide, chooser, params = self.guide, self.chooser, self.params
        mask = None if guide is None else guide.allowed(self.token_ids, self.num_prompt_tokens)
        chosen = None if chooser is None else chooser.after(self.token_ids[self.num_prompt_tokens :])
        self._guide_bans = array("i")
        if chosen is not None:
            self._fix(_common(chosen, params.allowed_token_ids, mask))
            return
        self._fix(params.allowed_token_ids)
        if mask is None:
            return
        if params.allowed_token_ids:
            mask &= torch.zeros_like(mask).index_fill_(0, torch.tensor(params.allowed_token_ids), True)
        elif 2 * int(mask.count_nonzero()) > len(mask):
            self._guide_bans = indices(~mask)
            return
        biases = torch.zeros(len(mask))
        biases[list(params.logit_bias or ())] = torch.tensor(list((params.logit_bias or {}).values()))
        if not mask.any():
            self._fix([])
            return
        self.fixed_ids, self.fixed_biases = indices(mask), as_array("f", biases[mask])
        self.penalties = self._pack(is_limited=True)

    def _fix(self, allowed: Sequence[int] | None) -> None:
        """Sets the biases; with ``allowed`` tokens these alone stay."""
        biases = self.params.logit_bias or {}
        if allowed is not None:
            # A row without entries would be left as it is; with this one nothing is left of it.
            biases = {token_id: biases.get(token_id, 0.0) for token_id in allowed} or {0: -math.inf}
        self.fixed_ids, self.fixed_biases = array("i", biases), array("f", biases.values())
        self.penalties = self._pack(is_limited=allowed is not None)

    def _pack(self, *, is_limited: bool) -> bytes:
        params = self.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return struct.pack("<4f", *penalties, is_limited)

    def banned_ids(self) -> array[int]:
        """Tokens that may not come next, some perhaps twice."""
        banned = self._bad_tokens + self._stops if self.position < self.params.min_tokens else self._bad_tokens[:]
        banned += self._guide_bans
        if self._ngrams is not None:
            banned.extend(self._ngrams.last_tokens(self.token_ids))
        if self._bad_words and self.position > 0:
            for prefix, last in self._bad_words.get(self.token_ids[-1], ()):
                if len(prefix) <= self.position and self.token_ids[-len(prefix) :] == prefix:
                    banned.append(last)
        return banned


def _common(chosen: list[int], allowed: Sequence[int] | None, mask: torch.Tensor | None) -> list[int]:
    """Those of ``chosen`` that a request's other rules allow, too."""
    if allowed is not None:
        known = set(allowed)
        chosen = [token_id for token_id in chosen if token_id in known]
    if mask is not None:
        chosen = [token_id for token_id, may_come in zip(chosen, mask[chosen].tolist(), strict=True) if may_come]
    return chosen
