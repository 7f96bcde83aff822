"""Sampling in plain torch, on the CPU and as reference: integer weights, radix selection, a draw by a hashed number.

Each operation on floats is one of IEEE's, rounded once, so any device finds the same integers and the same token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .settings import Settings, draw_number

LOG2_ONE = 40  # log2 of the likeliest token's weight; 2**40 x 2**20 tokens stay well inside int64
# 2**x for x in [-1/2, 1/2], the least relative error for p(0) = 1 (Lawson's iteration): 1.9e-7 in float32 arithmetic.
EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
ROUNDER = 1.5 * 2.0**23  # added to a float32 it rounds to a whole number, which stands in the low bits
TILE = 128  # tokens summed per step of the two-level walk
CHUNK = {"cpu": 1 << 18}  # logits drawn from at once: they fit a core's cache; elsewhere a share of memory
CANDIDATES = 64  # best tokens that top_k and top_p try first; more cost a larger sort, fewer more searches
OK, NOT_FINITE, ALL_MASKED = 0, 1, 2  # faults of a row


def sample_reference(logits: Tensor, settings: Settings | None, raw_peak: Tensor | None) -> Tensor:
    """See ``sample``."""
    peak, token_ids = logits.max(dim=-1)
    peak = peak.float()
    faults = (peak - peak).ne(0)  # the difference is NaN for a NaN or an infinity
    if raw_peak is not None:
        faults = torch.where(raw_peak.isfinite(), faults * ALL_MASKED, NOT_FINITE)
    if settings is not None:
        drawn = settings.rows[:, 0].nonzero()[:, 0]
        if len(drawn) == len(logits):
            token_ids = draw(logits, peak, settings)
        elif len(drawn):
            rows = Settings(settings.rows[drawn], settings.positions[drawn], settings.limited)
            token_ids[drawn] = draw(logits[drawn], peak[drawn], rows)
    return torch.stack((token_ids, faults))


def draw(logits: Tensor, peak: Tensor, settings: Settings) -> Tensor:
    """Token ids [R] int64 of logits [R, V] by row maxima ``peak`` [R] float32; no row is greedy, each stands alone."""
    chunk = max(1, CHUNK.get(logits.device.type, 1 << 24) // logits.shape[1])
    parts = zip(
        logits.split(chunk), peak.split(chunk), settings.rows.split(chunk), settings.positions.split(chunk), strict=True
    )
    return torch.cat([_draw(*part) for part in parts])


def _draw(logits: Tensor, peak: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    scale, floor, top_p = rows[:, :3].view(torch.float64).unsqueeze(-1).unbind(1)
    scores = (logits.float() - peak[:, None]).mul_(scale.float())
    weights = weigh(scores)
    top_k = rows[:, 3:4].where(rows[:, 3:4] < logits.shape[1], 0)
    has_top_k, has_top_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if has_top_k or has_top_p or bool((floor > -math.inf).any()):
        floor = floor.float()
        best = scores.topk(min(CANDIDATES, logits.shape[1]), dim=-1).values if has_top_k or has_top_p else scores
        if has_top_k:
            floor = torch.maximum(floor, _top_k_floor(scores, best, top_k))
        weights = weights.where(scores >= floor, 0)
        if has_top_p:
            weights = weights.where(scores >= _top_p_floor(scores, best, weights, top_p), 0)
    numbers = [draw_number(*pair) for pair in zip(rows[:, 4].tolist(), positions.tolist(), strict=True)]
    return pick(weights, torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None])


def weigh(scores: Tensor) -> Tensor:
    """Scores (log2, at most 0) -> int64 weights 2^(40 + score), rounded down, within 2e-7 relative."""
    scores = scores.clamp(min=-60.0)
    whole = scores + ROUNDER
    rest = scores.sub_(whole - ROUNDER)
    power = rest * (EXP2[-1] * 2.0**LOG2_ONE)
    for coefficient in EXP2[-2:0:-1]:
        power.add_(coefficient * 2.0**LOG2_ONE).mul_(rest)
    power.add_(EXP2[0] * 2.0**LOG2_ONE)
    power.view(torch.int32).add_(whole.view(torch.int32) << 23)  # added to the exponent
    return power.long()


def _top_k_floor(scores: Tensor, best: Tensor, top_k: Tensor) -> Tensor:
    """Score of the k-th best token of each row [R, 1]; -inf where the row has no top_k. ``best`` is sorted."""
    floor = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1))
    wide = (top_k > best.shape[1])[:, 0]
    if bool(wide.any()):
        floor[wide] = _score_reaching(scores[wide], torch.ones_like(scores[wide]).long(), top_k[wide])
    return floor.masked_fill_(top_k == 0, -math.inf)


def _top_p_floor(scores: Tensor, best: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """Score of the last token of the nucleus [R, 1]: the fewest best tokens whose weight reaches ``top_p``.

    ``weights`` are those left by min_p and top_k. Most rows end the nucleus among ``best``; the rest search.
    """
    target = (top_p * weights.sum(dim=-1, keepdim=True).double()).ceil().long()
    reached = weigh(best).cumsum(dim=-1) >= target
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


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """The first token id whose cumulative weight exceeds u x total, a row: weights [R, V] int64, u [R, 1] float64."""
    vocab_size = weights.shape[1]
    padding = -vocab_size % TILE
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    tiles = weights.view(len(weights), -1, TILE)
    tile_sums = tiles.sum(dim=-1).cumsum(dim=-1)
    total = tile_sums[:, -1:]
    target = torch.minimum((u * total.double()).long(), total - 1)  # the product may round up to the total
    tile = torch.searchsorted(tile_sums, target, right=True).clamp_(max=tiles.shape[1] - 1)
    before = torch.where(tile > 0, tile_sums.gather(1, (tile - 1).clamp(min=0)), 0)
    inner = tiles[torch.arange(len(tiles), device=tiles.device), tile[:, 0]].cumsum(dim=-1)
    lane = torch.searchsorted(inner, target - before, right=True).clamp_(max=TILE - 1)
    return (tile * TILE + lane)[:, 0].clamp_(max=vocab_size - 1)  # a row of NaN may sum to anything
