"""Sampler: turns logits into tokens on any device. It does not decide when a request stops.

Order of operations (vLLM's): log-probabilities of the raw logits; masks (allowed_token_ids, bad_words,
min_tokens) and logit_bias; penalties; temperature; min_p; top_k; top_p; draw.

A draw reads one uniform number that is a hash of (seed, position), and walks the cumulative weights in order
of token id. Weights are integers, so their sums are exact: a request's tokens depend on its own logits, seed
and position alone, never on its neighbours, their order, chunking or preemption. top_k, top_p and min_p are
thresholds on the logit: of equal logits at the boundary all are kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import RequestError
from .host_copy import HostCopy
from .logprobs import PendingLogprobs, TokenLogprobs
from .request import SamplingParams

WEIGHT_ONE = float(2**40)  # weight of the likeliest token; 2**40 x 2**20 tokens stay well inside int64
DRAW_TILE = 128  # tokens summed per step of the two-level walk
DRAW_CHUNK = {"cpu": 1 << 18}  # logits drawn from at once: what a core's cache holds; elsewhere memory's share
TOP_CANDIDATES = 64  # tokens among which top_k and top_p look before they search the vocabulary
MIN_TEMPERATURE = 1e-5  # below it float32 logits are greedy anyway
_U64 = (1 << 64) - 1


class SampledToken(NamedTuple):
    """One row's result. ``logprobs`` if the request asks for them; with an ``error`` the token id is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class TokenCounts:
    """Distinct token ids of one request and how often each was generated; only grows, like the request."""

    __slots__ = ("_num_seen", "_slot_of", "counts", "ids")

    def __init__(self) -> None:
        self.ids, self.counts = array("q"), array("q")
        self._slot_of: dict[int, int] = {}
        self._num_seen = 0

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
    """What the sampler knows of one request. Made once when the request starts, it lives and dies with it.

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
    counts: TokenCounts | None = field(init=False, default=None)
    is_plain: bool = field(init=False, default=False)  # greedy with nothing else to do

    def __post_init__(self) -> None:
        params = self.params
        penalized = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (
            0.0,
            0.0,
            1.0,
        )
        self.counts = TokenCounts() if penalized else None
        edited = penalized or params.min_tokens or params.logit_bias or params.allowed_token_ids or self.bad_word_ids
        self.is_plain = params.is_greedy and not edited and params.logprobs is None

    @property
    def position(self) -> int:
        """Index in the output of the token to be sampled."""
        return len(self.token_ids) - self.num_prompt_tokens


class PendingTokens:
    """Tokens that the device may still be computing: one result a row, in order.

    ``token_ids`` [M] int64 lies on the device of the logits, for the next step to read. Every id is one of the
    vocabulary's, also in a row that ends in an error.
    """

    def __init__(self, token_ids: Tensor, raw_peak: Tensor, peak: Tensor):
        self.token_ids = token_ids
        self._packed = HostCopy(torch.stack((token_ids.double(), raw_peak.double(), peak.double()), dim=1))
        self._ranked: list[int] = []
        self._logprobs: PendingLogprobs | None = None

    def rank(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """Enqueues the log-probabilities that ``rows`` ask for."""
        wanted = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return
        self._ranked = [i for i, _ in wanted]
        everything = len(wanted) == len(rows)
        index = slice(None) if everything else torch.tensor(self._ranked, device=logits.device)
        self._logprobs = PendingLogprobs(logits[index], self.token_ids[index], [k for _, k in wanted])

    def wait(self) -> list[SampledToken]:
        """Blocks until the tokens are on the host."""
        sampled = [_judge(*values) for values in self._packed.wait().tolist()]
        if self._logprobs is not None:
            for i, logprobs in zip(self._ranked, self._logprobs.wait(), strict=True):
                if sampled[i].error is None:
                    sampled[i] = SampledToken(sampled[i].token_id, logprobs)
        return sampled


class Sampler:
    """Samples one token a row. Holds no state: what a request accumulates lives in its ``SampleRow``."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """``launch`` and ``wait`` in one."""
        return self.launch(logits, rows).wait() if rows else []

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> PendingTokens:
        """Enqueues one token a row, at least one. logits [M, V], any float dtype, is left unchanged.

        A row with NaN or +Inf, or with every token masked, gets ``error`` and ``token_id`` -1; the others go on.
        ``rows`` are read before this returns.
        """
        if all(row.is_plain for row in rows):
            peak, token_ids = logits.max(dim=-1)
            return PendingTokens(token_ids, peak, peak)
        raw_peak = logits.amax(dim=-1)
        edited = edit_logits(logits, rows)
        peak, token_ids = edited.max(dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            everything = len(drawn) == len(rows)
            scores = edited if everything else edited[index]
            token_ids[index] = draw(scores, peak if everything else peak[index], [rows[i] for i in drawn])
        pending = PendingTokens(token_ids, raw_peak, peak)
        pending.rank(logits, rows)
        return pending


def _judge(token_id: float, raw_peak: float, peak: float) -> SampledToken:
    """NaN reaches a row's peak, so the peaks tell the usable rows."""
    if not math.isfinite(raw_peak):
        error = RequestError("the model's logits are not finite", remedy="Try another dtype or KV precision")
        return SampledToken(-1, error=error)
    if not math.isfinite(peak):
        error = RequestError(
            "no token is left to sample",
            remedy="Relax allowed_token_ids, bad_words or min_tokens: together they mask every token",
        )
        return SampledToken(-1, error=error)
    return SampledToken(int(token_id))


# ---- masks, bias, penalties


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """logits [M, V] -> float32 [M, V] with masks, bias and penalties applied; a copy if anything changes."""
    edited = logits.float()
    banned, biased = _collect_edits(rows)
    allowed = [(i, row.params.allowed_token_ids) for i, row in enumerate(rows) if row.params.allowed_token_ids]
    penalized = [i for i, row in enumerate(rows) if row.counts is not None]
    if not (banned or biased or allowed or penalized):
        return edited
    if edited is logits:
        edited = logits.clone()
    for i, ids in allowed:
        kept_ids = torch.tensor(ids, device=logits.device)
        kept = edited[i, kept_ids]
        edited[i].fill_(-math.inf)
        edited[i, kept_ids] = kept
    if banned:
        index = torch.tensor(banned, device=logits.device).T
        edited[index[0], index[1]] = -math.inf
    if biased:
        entries = torch.tensor(biased, dtype=torch.float64).to(logits.device).T
        edited.index_put_((entries[0].long(), entries[1].long()), entries[2].float(), accumulate=True)
    if penalized:
        _penalize(edited, [(i, rows[i]) for i in penalized])
    return edited


def _collect_edits(rows: Sequence[SampleRow]) -> tuple[list[tuple[int, int]], list[tuple[int, int, float]]]:
    """(row, token id) pairs to mask and (row, token id, bias) triples to add."""
    banned: list[tuple[int, int]] = []
    biased: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        if row.position < row.params.min_tokens:
            banned.extend((i, token_id) for token_id in row.stop_ids)
        for word in row.bad_word_ids:
            if _word_is_due(word, row):
                banned.append((i, word[-1]))
        if row.params.logit_bias:
            biased.extend((i, token_id, bias) for token_id, bias in row.params.logit_bias.items())
    return banned, biased


def _word_is_due(word: Sequence[int], row: SampleRow) -> bool:
    """Whether the output ends in all but the last token of ``word``."""
    prefix_len = len(word) - 1
    if prefix_len > row.position:
        return False
    return prefix_len == 0 or row.token_ids[-prefix_len:] == list(word[:-1])


def _penalize(logits: Tensor, rows: Sequence[tuple[int, SampleRow]]) -> None:
    """In place, at the tokens a request has seen; repetition counts prompt and output, the others output."""
    ids, counts, sizes, settings = [], [], [], []
    for i, row in rows:
        assert row.counts is not None
        row.counts.update(row.token_ids, row.num_prompt_tokens)
        if not row.counts.ids:
            continue
        ids.append(torch.frombuffer(row.counts.ids, dtype=torch.int64))
        counts.append(torch.frombuffer(row.counts.counts, dtype=torch.int64))
        sizes.append(len(row.counts.ids))
        params = row.params
        settings.append((i, params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    if not ids:
        return
    repeats = torch.tensor(sizes)
    per_entry = torch.tensor(settings, dtype=torch.float64).repeat_interleave(repeats, dim=0)
    table = torch.cat((per_entry, torch.stack((torch.cat(ids), torch.cat(counts)), dim=1)), dim=1).to(logits.device)
    row_index, id_index, count = table[:, 0].long(), table[:, 4].long(), table[:, 5].float()
    repetition, frequency, presence = table[:, 1].float(), table[:, 2].float(), table[:, 3].float()
    values = logits[row_index, id_index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[row_index, id_index] = values - frequency * count - presence * (count > 0)


# ---- the draw


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments (SplitMix64 mixing, twice)."""
    state = _mix(_mix(seed & _U64) ^ (position & _U64))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)


def draw(logits: Tensor, peak: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """logits [R, V] float32, peak [R] its row maxima -> token ids [R] int64. Rows never meet."""
    chunk = max(1, DRAW_CHUNK.get(logits.device.type, 1 << 24) // logits.shape[1])
    starts = range(0, len(rows), chunk)
    return torch.cat([_draw(logits[i : i + chunk], peak[i : i + chunk], rows[i : i + chunk]) for i in starts])


def _draw(logits: Tensor, peak: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    settings = torch.tensor([_draw_settings(row) for row in rows], dtype=torch.float64).to(logits.device)
    temperature, min_score, top_p, u = settings.unsqueeze(-1).unbind(1)
    scores = (logits - peak[:, None]).div_(temperature.float())
    weights = scores.exp().mul_(WEIGHT_ONE).long()
    top_k = [_effective_top_k(row.params, logits.shape[1]) for row in rows]
    has_top_p = any(row.params.top_p < 1 for row in rows)
    if has_top_p or any(top_k):
        best = scores.topk(min(TOP_CANDIDATES, logits.shape[1]), dim=-1).values
        floor = torch.maximum(min_score.float(), _top_k_floor(scores, best, top_k))
        weights = torch.where(scores >= floor, weights, 0)
        if has_top_p:
            weights = torch.where(scores >= _top_p_floor(scores, best, weights, top_p), weights, 0)
    elif any(row.params.min_p > 0 for row in rows):
        weights = torch.where(scores >= min_score.float(), weights, 0)
    return _pick(weights, u)


def _draw_settings(row: SampleRow) -> tuple[float, float, float, float]:
    params = row.params
    min_score = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return max(params.temperature, MIN_TEMPERATURE), min_score, params.top_p, uniform(row.seed, row.position)


def _effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """0 where top_k does not limit."""
    return params.top_k if 0 < params.top_k < vocab_size else 0


def _top_k_floor(scores: Tensor, best: Tensor, top_k: list[int]) -> Tensor:
    """Score of the k-th best token of each row [R, 1]; -inf where the row has no top_k. ``best`` is sorted."""
    k = torch.tensor(top_k, device=scores.device)[:, None]
    floor = best.gather(1, (k - 1).clamp(0, best.shape[1] - 1))
    if max(top_k) > best.shape[1]:
        floor = torch.where(k > best.shape[1], _score_reaching(scores, torch.ones_like(scores).long(), k), floor)
    return floor.masked_fill_(k == 0, -math.inf)


def _top_p_floor(scores: Tensor, best: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """Score of the last token of the nucleus [R, 1]: the fewest best tokens whose weight reaches ``top_p``.

    ``weights`` are those left by min_p and top_k. Most rows find it among the ``best``; the rest search.
    """
    target = (top_p * weights.sum(dim=-1, keepdim=True).double()).ceil().long()
    reached = best.exp().mul_(WEIGHT_ONE).long().cumsum(dim=-1) >= target
    floor = best.gather(1, reached.byte().argmax(dim=-1, keepdim=True))
    unlimited = top_p >= 1
    wide = ~(reached[:, -1:] | unlimited)[:, 0]
    if bool(wide.any()):
        floor[wide] = _score_reaching(scores[wide], weights[wide], target[wide])
    return floor.masked_fill_(unlimited, -math.inf)


def _score_reaching(scores: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The highest score such that the tokens at or above it weigh at least ``target`` [R, 1].

    Radix selection instead of a sort: the bits of a non-negative float order it, and sums of integers are exact.
    """
    keys = scores.abs().view(torch.int32).long()  # scores are <= 0: the best token has the smallest key
    found = torch.zeros_like(target)
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        digits = keys >> shift & (1 << width) - 1
        sums = weights.new_zeros(len(keys), 1 << width).scatter_add_(1, digits, weights).cumsum_(dim=-1)
        digit = torch.searchsorted(sums, target).clamp_(max=sums.shape[1] - 1)
        target = target - torch.where(digit > 0, sums.gather(1, (digit - 1).clamp(min=0)), 0)
        weights = torch.where(digits == digit, weights, 0)
        found = found << width | digit
    return -found.int().view(torch.float32)


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """weights [R, V] int64, u [R, 1] float64 -> first token id whose cumulative weight exceeds u x total."""
    padding = -weights.shape[1] % DRAW_TILE
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    tiles = weights.view(len(weights), -1, DRAW_TILE)
    tile_sums = tiles.sum(dim=-1).cumsum(dim=-1)
    total = tile_sums[:, -1:]
    target = torch.minimum((u * total.double()).long(), total - 1)  # the product may round up to the total
    tile = torch.searchsorted(tile_sums, target, right=True).clamp_(max=tiles.shape[1] - 1)
    before = torch.where(tile > 0, tile_sums.gather(1, (tile - 1).clamp(min=0)), 0)
    inner = tiles[torch.arange(len(tiles), device=tiles.device), tile[:, 0]].cumsum(dim=-1)
    lane = torch.searchsorted(inner, target - before, right=True).clamp_(max=DRAW_TILE - 1)
    return (tile * DRAW_TILE + lane)[:, 0]
