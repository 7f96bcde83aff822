"""PatternKV by its own rules: residuals against patterns mined from the prompt, keys per channel and values per token.

A pattern is the mean of a cluster of the prompt's keys or values, of one head; each later window of 128 tokens adds its
centre. The mean over a batch, which the release mines, is left out: here a sequence has patterns of its own.
Source:  PatternKV (arXiv 2510.05176), the released Llama model's cache
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from qkv_engine.config import KVConfig

from . import quantizers
from .cache import LayerCache, Scheme, Side, Simulate, by_channel, by_token

WINDOW = 128  # tokens that leave full precision together, and K's group
PATTERNS = 32  # mined of a prompt, a head and side
ITERATIONS = 30  # of Lloyd's algorithm, at most
TOLERANCE = 1e-4  # shift of coordinates at which the iterations end
ALPHA = 0.05  # significance of V's gate; the paper does not state it, the release has it

# Tokens [H, n, D] and patterns [H, M, D] -> the vector to subtract from each token, [H, n, D], 0 for no pattern.
Assign = Callable[[Tensor, Tensor], Tensor]
Mine = Callable[[Tensor], Tensor]  # a prompt [H, n, D] -> its patterns [H, M, D]


def nearest(x: Tensor, patterns: Tensor) -> Tensor:
    """The pattern at the least Euclidean distance of each token, the first of equals."""
    return closest(patterns, torch.cdist(x, patterns, compute_mode="donot_use_mm_for_euclid_dist"))


def flattest(x: Tensor, patterns: Tensor) -> Tensor:
    """The pattern that leaves each token the smallest range over its channels, the first of equals."""
    return closest(patterns, torch.stack([spread(x - pattern[:, None]) for pattern in patterns.unbind(1)], -1))


def gated(assign: Assign, limit: float) -> Assign:
    """``assign``, but no pattern where the residual's range is more than ``limit`` times the token's own."""

    def assigned(x: Tensor, patterns: Tensor) -> Tensor:
        found = assign(x, patterns)
        return torch.where((spread(x - found) <= limit * spread(x))[..., None], found, 0)

    return assigned


def spread(x: Tensor) -> Tensor:
    """Range of each token, ``[..., D]`` -> ``[...]``."""
    return x.amax(-1) - x.amin(-1)


def closest(patterns: Tensor, distance: Tensor) -> Tensor:
    """The patterns ``[H, n, D]`` of the least ``distance`` [H, n, M]."""
    index = distance.argmin(-1, keepdim=True)
    return patterns.gather(1, index.expand(*index.shape[:2], patterns.shape[2]))


def gate_limit(head_dim: int, alpha: float = ALPHA) -> float:
    """rho*: the ratio of ranges up to which subtracting a pattern pays with significance ``alpha``.

    Root of 1 - rho^2 = c sqrt(1 + rho^4), c = 2 z / sqrt(5 d), quadratic in rho^2.
    """
    c = 2 * NormalDist().inv_cdf(1 - alpha) / math.sqrt(5 * head_dim)
    return math.sqrt((1 - math.sqrt(1 - (1 - c**2) ** 2)) / (1 - c**2))


def mine(x: Tensor, num_patterns: int = PATTERNS) -> Tensor:
    """Patterns of a prompt ``[H, n, D]``, each head by itself: ``[H, min(num_patterns, n), D]``, rounded to fp16."""
    return torch.stack([k_means(head, min(num_patterns, x.shape[1])) for head in x]).half().float()


def k_means(x: Tensor, count: int) -> Tensor:
    """Lloyd's iterations of ``x`` [n, D] from ``count`` of its tokens; empty clusters start again at a random one."""
    generator = torch.Generator().manual_seed(0)
    centroids = x[torch.rand(len(x), generator=generator).topk(count).indices]
    for i in range(ITERATIONS):
        label = torch.cdist(x, centroids).argmin(-1)
        size = label.bincount(minlength=count)[:, None]
        moved = torch.zeros_like(centroids).index_add_(0, label, x) / size.clamp(min=1)
        moved = torch.where(size > 0, moved, x[torch.randint(len(x), (count,), generator=generator)])
        shift = float((moved - centroids).abs().max())
        centroids = moved
        if i > 0 and shift <= TOLERANCE:
            break
    return centroids


class PatternSide(Side):
    """A side whose tokens leave full precision in windows, as residuals; the first tokens it settles are the prompt."""

    def __init__(self, mine: Mine, prompt: Assign, window: Assign, quantize: Simulate):
        super().__init__(lambda full: full // WINDOW * WINDOW, lambda x: self._coded(x, prompt))
        self.mine, self.window, self.quantize = mine, window, quantize
        self.patterns: Tensor | None = None  # [H, M, D]

    def settle(self) -> None:
        if self.patterns is None:
            self.patterns = self.mine(self.tokens)
            super().settle()
            self.simulate = self._decoded
        else:
            super().settle()

    def _decoded(self, x: Tensor) -> Tensor:
        """A window after the prompt, which adds a pattern before it is assigned."""
        assert self.patterns is not None, "mined with the prompt"
        self.patterns = torch.cat((self.patterns, centre(x)), 1)
        return self._coded(x, self.window)

    def _coded(self, x: Tensor, assign: Assign) -> Tensor:
        assert self.patterns is not None, "mined with the prompt"
        pattern = assign(x, self.patterns)
        return self.quantize((x - pattern).half()) + pattern


def centre(x: Tensor) -> Tensor:
    """The middle of each channel's range over a window ``[H, n, D]``: ``[H, 1, D]``, rounded to fp16."""
    return ((x.amin(1, keepdim=True) + x.amax(1, keepdim=True)) / 2).half().float()


def layer(head_dim: int, bits: int = 2) -> LayerCache:
    """A layer's cache. K and V in full precision: 0 to 127 tokens between steps.

    Prompts are assigned by Euclidean distance, windows by range. Every token of K has a pattern, one of V only where
    the gate passes. The release never quantizes V again after a prompt of exactly 128 tokens; here that is a window.
    """

    def quantize(groups: Tensor) -> Tensor:
        return quantizers.kivi(groups, bits).values()

    gate = partial(gated, limit=gate_limit(head_dim))
    k = PatternSide(mine, nearest, flattest, by_channel(quantize, WINDOW))
    v = PatternSide(mine, gate(nearest), gate(flattest), by_token(quantize, WINDOW))
    return LayerCache(k, v)


def scheme(head_dim: int, preset: KVConfig) -> Scheme:
    """PatternKV at 2 bits, beside the engine's ``preset``."""
    return Scheme(lambda _: layer(head_dim), preset)
