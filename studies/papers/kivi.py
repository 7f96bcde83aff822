"""KIVI by its own rules: per-channel keys flushed in blocks of R tokens, per-token values that leave one by one.

Source:  KIVI (arXiv 2402.02750), models/llama_kivi.py
"""

from __future__ import annotations

from qkv_engine.config import DENSE16, KVConfig, RungConfig

from . import quantizers
from .cache import LayerCache, Scheme, Side, by_channel, by_token

GROUP = 32  # elements that share a step and a minimum, as the paper has it: 1 bit of metadata an element
RESIDUAL = 128  # tokens: R, a multiple of the group


def layer(k_bits: int, v_bits: int, group: int = GROUP, residual: int = RESIDUAL) -> LayerCache:
    """A layer's cache. K in full precision: 0 to R - 1 tokens between steps; V: the newest R."""
    k = Side(
        lambda full: full // residual * residual,
        by_channel(lambda groups: quantizers.kivi(groups, k_bits).values(), group),
    )
    v = Side(
        lambda full: max(0, full - residual),
        by_token(lambda groups: quantizers.kivi(groups, v_bits).values(), group),
    )
    return LayerCache(k, v)


def scheme(k_bits: int, v_bits: int, group: int = GROUP) -> Scheme:
    """KIVI with K and V of these bits, beside blocks of 128 tokens in the same groups."""
    rung = RungConfig("kivi", f"int{k_bits}-channel-{group}", f"int{v_bits}-token-{group}")
    preset = KVConfig(name=f"k{k_bits}v{v_bits}-g{group}", rungs=(DENSE16, rung), recent=RESIDUAL, eager=True)
    return Scheme(lambda _: layer(k_bits, v_bits, group), preset)
