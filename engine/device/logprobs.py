"""Log-probabilities and ranks of tokens under the raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from ..request import Logprob
from ..text.tokenizer import Tokenizer
from .host_copy import CopyToHost

LOGPROB_CHUNK = 1 << 25  # float32 values a chunk of prompt log-probabilities may hold

Place = tuple[int, float, int]  # token id, its log-probability and rank


class TokenLogprobs(NamedTuple):
    """Log-probability and rank of one token; ``top``: those of the best ones, ``others``: of any that were named."""

    token_id: int
    logprob: float
    rank: int
    top: list[Place]
    others: list[Place]

    def entries(self, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
        """All of the tokens by id, as in a request's output; with their text if there is a ``tokenizer``."""
        known = [(self.token_id, self.logprob, self.rank), *self.others, *self.top]
        text = (lambda token_id: None) if tokenizer is None else tokenizer.token_text
        return {token_id: Logprob(logprob, rank, text(token_id)) for token_id, logprob, rank in known}


class PendingLogprobs:
    """Log-probabilities of one token a row, which the device may still be computing.

    logits [R, V], any float dtype; token_ids [R] int64 on the same device; ``ks[r]`` tokens come in row r's ``top``.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, ks: Sequence[int]):
        self._ks = ks
        self._columns = CopyToHost(_columns(logits, token_ids[:, None], max(ks)))

    def wait(self) -> list[TokenLogprobs]:
        """One result a row; blocks until the device has computed them."""
        return _read(self._columns.wait(), 1, self._ks)


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, target_ids: Sequence[int], k: int, others: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, as prompt_logprobs needs them.

    logits [T, V], any float dtype; ``target_ids[t]`` is the token that follows position t, ``others[t]`` are more
    tokens wanted there. One result per position, with the ``k`` likeliest tokens in ``top``. Raises RequestError where
    the logits are not finite.
    """
    chunk = max(1, LOGPROB_CHUNK // logits.shape[1])
    rows = _rows(target_ids, others)
    results: list[TokenLogprobs] = []
    for start in range(0, len(logits), chunk):
        part = logits[start : start + chunk]
        if not bool(part.amax(dim=-1).isfinite().all()):
            raise RequestError("the model's logits are not finite", remedy="Try another dtype or KV precision")
        ids = torch.tensor(rows[start : start + chunk], device=logits.device)
        results += _read(_columns(part, ids, k).tolist(), ids.shape[1], [k] * len(part))
    return results


def _rows(target_ids: Sequence[int], others: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each target with its others, filled up with the target to rows of one length."""
    width = max(map(len, others), default=0)
    named = others or [()] * len(target_ids)
    return [[target, *ids, *[target] * (width - len(ids))] for target, ids in zip(target_ids, named, strict=True)]


def _columns(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """[R, 3 A + 2 k] float64: the ids of token_ids [R, A], their logprobs, their ranks (1 is the best); logprobs and
    ids of the ``k`` best.
    """
    scores = logits.float()
    peak = scores.amax(dim=-1, keepdim=True)
    norm = (scores - peak).exp().sum(dim=-1, keepdim=True).log()  # apart from the peak: exact near probability 1
    own = scores.gather(1, token_ids)
    ranks = [(scores > column).sum(dim=-1, keepdim=True) + 1 for column in torch.tensor_split(own, own.shape[1], dim=1)]
    best = scores.topk(min(k, scores.shape[1]), dim=-1)
    columns = (token_ids, own - peak - norm, *ranks, best.values - peak - norm, best.indices)
    return torch.cat([column.double() for column in columns], dim=1)


def _read(columns: list[list[float]], num_named: int, ks: Sequence[int]) -> list[TokenLogprobs]:
    results = []
    for k, row in zip(ks, columns, strict=True):
        ids, logprobs, ranks = (row[i * num_named : (i + 1) * num_named] for i in range(3))
        named = [(int(one), logprob, int(rank)) for one, logprob, rank in zip(ids, logprobs, ranks, strict=True)]
        pairs = row[3 * num_named :]
        found = zip(pairs[len(pairs) // 2 :], pairs, range(1, k + 1), strict=False)
        top = [(int(best_id), value, place) for best_id, value, place in found]
        results.append(TokenLogprobs(*named[0], top, named[1:]))
    return results
