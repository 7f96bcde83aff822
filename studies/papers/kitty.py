"""Kitty by its own rules: pages of 128 tokens in which the strongest channels of K have 4 bits and all else 2.

Source:  Kitty (arXiv 2511.18643), kitty/kvcache/kitty.py and kitty_sim/kitty_simulate.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qkv_engine.config import KVConfig

from . import quantizers
from .cache import LayerCache, Scheme, Side, by_token
from .quantizers import Codes

PAGE = 128  # tokens of a page, and of the window of V
SINK = 32  # first tokens of a sequence, never quantized
BITS, BOOSTED_BITS = 2, 4


def boosted_channels(pages: Tensor, num_boosted: int) -> Tensor:
    """The channels with the largest mean magnitude, a mask ``[..., D]`` of ``pages`` [..., D, tokens].

    Of equal channels the first are taken; the release leaves ties to the framework's top-k.
    """
    order = torch.sort(pages.abs().mean(-1), dim=-1, descending=True, stable=True).indices
    mask = torch.zeros(pages.shape[:-1], dtype=torch.bool)
    return mask.scatter(-1, order[..., :num_boosted], True)


def page_codes(
    pages: Tensor, num_boosted: int, quantize: Callable[[Tensor, Tensor], Codes] = quantizers.kitty
) -> Codes:
    """The codes of K pages ``[..., D, tokens]``, each page and head with boosted channels of its own."""
    bits = torch.where(boosted_channels(pages, num_boosted), BOOSTED_BITS, BITS)
    return quantize(pages, bits[..., None])


def layer(num_boosted: int, *, simulator: bool = False) -> LayerCache:
    """A layer's cache by the engine's rules, or by those of the accuracy ``simulator`` (the paper's tables).

    The engine packs whole pages of K and V as soon as 128 tokens wait, V's beyond a window of 128. The simulator
    quantizes a K page when the 129th token has come, none of a prompt up to 160 tokens, and V token by token.
    """
    quantize: Callable[[Tensor, int | Tensor], Codes] = quantizers.kitty_simulator if simulator else quantizers.kitty

    def keys(x: Tensor) -> Tensor:
        pages = torch.unflatten(x, 1, (-1, PAGE)).transpose(2, 3)  # [H, pages, D, tokens]
        return _read(page_codes(pages, num_boosted, quantize)).transpose(2, 3).flatten(1, 2)

    values = by_token(lambda groups: _read(quantize(groups, BITS)), PAGE)
    k_rule, v_rule = (_simulator_k, _simulator_v) if simulator else (_engine_k, _engine_v)
    return LayerCache(Side(k_rule, keys, SINK), Side(v_rule, values, SINK))


def _read(codes: Codes) -> Tensor:
    """Values as the kernels read them: fp16."""
    return codes.values().half().float()


def _engine_k(full: int) -> int:
    return full // PAGE * PAGE


def _engine_v(full: int) -> int:
    return max(0, full - PAGE) // PAGE * PAGE


def _simulator_k(full: int) -> int:
    return full // PAGE * PAGE if full > PAGE else 0


def _simulator_v(full: int) -> int:
    return max(0, full - PAGE)


def scheme(num_boosted: int, preset: KVConfig, *, simulator: bool = False) -> Scheme:
    """Kitty with ``num_boosted`` channels a head, beside the engine's ``preset``."""
    return Scheme(lambda _: layer(num_boosted, simulator=simulator), preset)
