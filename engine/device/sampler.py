"""Sampling of tokens from logits on any device. It does not decide when a request stops.

Order of operations (vLLM's): log-probabilities of the raw logits; masks (allowed_token_ids, allowed_tokens,
bad_words, no_repeat_ngram_size, min_tokens) and logit_bias; penalties; temperature; min_p; top_k; top_p; draw.

A draw reads one number that is a hash of (seed, position), and walks the cumulative weights in order of token id.
Weights are integers, so their sums are exact: a request's tokens depend on its own logits, seed and position alone,
never on its neighbours, their order, chunking or preemption. The arithmetic is in ``kernels/sample``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.sample import NOT_FINITE, edit, sample
from qkv_engine.kernels.to_device import to_device

from ..errors import RequestError
from ..sampling.sample_tables import SampleTables
from .host_copy import CopyToHost
from .logprobs import PendingLogprobs, TokenLogprobs
from .pinned import RowsCopy


class SampledToken(NamedTuple):
    """One row's result. ``logprobs`` if the request asks for them; with an ``error`` the token id is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class SampledTokens(NamedTuple):
    """Results of several rows: a token id each, and the whole result of rows with log-probabilities or an error."""

    token_ids: list[int]
    special: dict[int, SampledToken]


class PendingTokens:
    """Tokens that the device may still be computing: one result a row, in order.

    ``token_ids`` [M] int64 lies on the device of the logits, for the next step to read. Every id is one of the
    vocabulary's, also in a row that ends in an error.
    """

    def __init__(self, sampled: Tensor, copy: RowsCopy | None = None):
        """``sampled`` [2, M] int64 are tokens and faults, ``copy`` the same on their way to the host."""
        self._sampled, self._copy = sampled, CopyToHost(sampled) if copy is None else copy
        self._ranked: list[int] = []
        self._logprobs: PendingLogprobs | None = None

    @property
    def token_ids(self) -> Tensor:
        return self._sampled[0]

    def rank(self, logits: Tensor, ranked: Sequence[tuple[int, int]]) -> None:
        """Enqueues log-probabilities: rows of ``logits``, and how many of the likeliest tokens each wants."""
        if not ranked:
            return
        self._ranked, token_ids = [i for i, _ in ranked], self.token_ids
        if len(ranked) < len(logits):
            index = to_device(torch.tensor(self._ranked), logits.device)
            logits, token_ids = logits[index], token_ids[index]
        self._logprobs = PendingLogprobs(logits, token_ids, [k for _, k in ranked])

    def wait(self) -> SampledTokens:
        """Blocks until the tokens are on the host."""
        token_ids, faults = self._copy.wait()
        special: dict[int, SampledToken] = {}
        if self._logprobs is not None:
            for i, logprobs in zip(self._ranked, self._logprobs.wait(), strict=True):
                special[i] = SampledToken(token_ids[i], logprobs)
        if any(faults):
            special.update({i: _failed(fault) for i, fault in enumerate(faults) if fault})
        return SampledTokens(token_ids, special)


@torch.inference_mode()
def sample_tokens(logits: Tensor, tables: SampleTables | None) -> PendingTokens:
    """Enqueues one token a row, the likeliest of each without ``tables``.

    logits [M, V], any float dtype, is left unchanged. A row with NaN or +Inf, or with every token masked, gets
    ``error`` and ``token_id`` -1; the others go on.
    """
    if tables is None:
        return PendingTokens(sample(logits))
    settings, edits = tables.on(logits.device)
    edited, raw_peak = (logits, None) if edits is None else edit(logits, edits)
    pending = PendingTokens(sample(edited, settings, raw_peak))
    pending.rank(logits, tables.ranked)
    return pending


def _failed(fault: int) -> SampledToken:
    if fault == NOT_FINITE:
        error = RequestError("the model's logits are not finite", remedy="Try another dtype or KV precision")
    else:
        error = RequestError(
            "no token is left to sample",
            remedy="Relax allowed_token_ids, bad_words, min_tokens and the like: together they mask every token",
        )
    return SampledToken(-1, error=error)
