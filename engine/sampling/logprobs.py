"""Log-probabilities and ranks of tokens under the raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device.host_copy import HostCopy
from ..errors import RequestError
from ..request import Logprob
from ..text.tokenizer import Tokenizer

LOGPROB_CHUNK = 1 << 25  # float32 values a chunk of prompt log-probabilities may hold


class TokenLogprobs(NamedTuple):
    """Log-probability and rank of one token; ``top`` holds (token id, logprob, rank) of the best ones."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float, int]]

    def entries(self, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
        """The token and the best ones by id, as in a request's output; with their text if there is a ``tokenizer``."""
        known = [(self.token_id, self.logprob, self.rank), *self.top]
        text = (lambda token_id: None) if tokenizer is None else tokenizer.token_text
        return {token_id: Logprob(logprob, rank, text(token_id)) for token_id, logprob, rank in known}


class PendingLogprobs:
    """Log-probabilities of one token a row, which the device may still be computing.

    logits [R, V], any float dtype; token_ids [R] int64 on the same device; ``ks[r]`` tokens come in row r's ``top``.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, ks: Sequence[int]):
        self._ks = ks
        self._columns = HostCopy(_columns(logits, token_ids, max(ks)))

    def wait(self) -> list[TokenLogprobs]:
        """One result a row; blocks until the device has computed them."""
        return _read(self._columns.wait(), self._ks)


@torch.inference_mode()
def token_logprobs(logits: Tensor, target_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, as prompt_logprobs needs them.

    logits [T, V], any float dtype; ``target_ids[t]`` is the token that follows position t. One result per
    position, with the ``k`` likeliest tokens in ``top``. Raises RequestError where the logits are not finite.
    """
    chunk = max(1, LOGPROB_CHUNK // logits.shape[1])
    results: list[TokenLogprobs] = []
    for start in range(0, len(logits), chunk):
        part = logits[start : start + chunk]
        if not bool(part.amax(dim=-1).isfinite().all()):
            raise RequestError("the model's logits are not finite", remedy="Try another dtype or KV precision")
        ids = torch.tensor(target_ids[start : start + chunk], device=logits.device)
        results += _read(_columns(part, ids, k).tolist(), [k] * len(part))
    return results


def _columns(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """[R, 3 + 2 k] float64: token id, its logprob and rank (1 is the best), logprobs and ids of the ``k`` best."""
    scores = logits.float()
    norm = scores.logsumexp(dim=-1, keepdim=True)
    ids = token_ids[:, None]
    own = scores.gather(1, ids)
    own_rank = (scores > own).sum(dim=-1, keepdim=True) + 1
    best = scores.topk(min(k, scores.shape[1]), dim=-1)
    columns = (ids, own - norm, own_rank, best.values - norm, best.indices)
    return torch.cat([column.double() for column in columns], dim=1)


def _read(columns: list[list[float]], ks: Sequence[int]) -> list[TokenLogprobs]:
    results = []
    for k, (token_id, logprob, rank, *pairs) in zip(ks, columns, strict=True):
        found = zip(pairs[len(pairs) // 2 :], pairs, range(1, k + 1), strict=False)
        top = [(int(best_id), value, place) for best_id, value, place in found]
        results.append(TokenLogprobs(int(token_id), logprob, int(rank), top))
    return results
