"""Cache simulator: keys and values of one layer of one sequence, quantized and dequantized where a scheme says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.config import KVConfig

# Tokens held in full precision after the sink, the new one included -> the oldest of them that are quantized now.
Rule = Callable[[int], int]
# Keys or values [H, n, D] float32 -> their values, quantized and dequantized.
Simulate = Callable[[Tensor], Tensor]
Quantize = Callable[[Tensor], Tensor]  # groups [..., G] -> their values, quantized and dequantized


class Side:
    """Keys or values of a layer: a sink, a quantized stretch that only grows, and the newest tokens in full precision.

    Full precision is fp16. ``rule``: how many tokens leave it now; ``simulate``: their values afterwards. The first
    ``sink`` tokens of the sequence never leave it.
    """

    def __init__(self, rule: Rule, simulate: Simulate, sink: int = 0):
        self.rule, self.simulate, self.sink = rule, simulate, sink
        self.length = self.quantized = 0  # tokens
        self._store = torch.empty(0)

    @property
    def full(self) -> int:
        """Tokens in full precision."""
        return self.length - self.quantized

    @property
    def tokens(self) -> Tensor:
        """All tokens as attention reads them, ``[H, T, D]`` float32; a view."""
        return self._store[:, : self.length]

    def append(self, x: Tensor) -> None:
        """Adds tokens ``[H, n, D]`` in full precision."""
        end = self.length + x.shape[1]
        if not self.length:
            self._store = torch.empty(x.shape[0], 0, x.shape[2])
        if end > self._store.shape[1]:  # at least doubled, so that appends seldom copy all tokens
            self._store = torch.cat((self._store, torch.empty(x.shape[0], end, x.shape[2])), 1)
        self._store[:, self.length : end] = x.half().float()
        self.length = end

    def settle(self) -> None:
        """Quantizes the tokens that ``rule`` gives up."""
        num_tokens = self.rule(max(0, self.full - self.sink))
        if num_tokens:
            start = self.sink + self.quantized
            leaving = self._store[:, start : start + num_tokens]
            leaving.copy_(self.simulate(leaving))
            self.quantized += num_tokens


def full_precision() -> Side:
    """A side that never quantizes."""
    return Side(lambda full: 0, lambda x: x)


@dataclass
class LayerCache:
    """Both sides of a layer. ``quantizes_first``: tokens leave full precision before a decode step attends."""

    k: Side
    v: Side
    quantizes_first: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens, causal; a prompt, the first call, is attended in full precision.

        Shapes:  q [HQ, n, D], k and v [H, n, D];  returns [HQ, n, D]
        """
        quantizes_first = self.quantizes_first and self.k.length > 0
        self.k.append(k)
        self.v.append(v)
        if quantizes_first:
            self.settle()
        out = attention(q, self.k.tokens, self.v.tokens)
        if not quantizes_first:
            self.settle()
        return out

    def settle(self) -> None:
        self.k.settle()
        self.v.settle()


class Scheme(NamedTuple):
    """A paper's scheme: the simulated cache of a layer by its number, and the KV preset that serves it by blocks.

    ``preset`` is None where the engine has none.
    """

    layer: Callable[[int], LayerCache]
    preset: KVConfig | None


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of the last n of T tokens, query heads grouped; float32.

    Shapes:  q [HQ, n, D], k and v [H, T, D];  returns [HQ, n, D]
    """
    n, length = q.shape[1], k.shape[1]
    if n == 1:  # a query head is one of several queries of its KV head, which sees all tokens
        heads = q.view(1, k.shape[0], -1, q.shape[2])
        return F.scaled_dot_product_attention(heads, k[None], v[None]).view(q.shape)
    seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)[0]


def by_channel(quantize: Quantize, group: int) -> Simulate:
    """``quantize`` over groups of ``group`` tokens of one channel; token counts are multiples of it."""
    return lambda x: quantize(torch.unflatten(x, 1, (-1, group)).transpose(2, 3)).transpose(2, 3).flatten(1, 2)


def by_token(quantize: Quantize, group: int) -> Simulate:
    """``quantize`` over groups of ``group`` channels of one token, or of all where a head has fewer."""
    return lambda x: quantize(torch.unflatten(x, 2, (-1, min(group, x.shape[2])))).flatten(2)
