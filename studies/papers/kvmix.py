"""KVmix by its own rules: more bits for the layers whose projections have the largest gradients, ratio windows.

Source:  KVmix (arXiv 2506.08018), models/modeling_llama_KVmix.py and myprofileKV.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from qkv_engine.config import DENSE16, KVConfig, RungConfig

from . import quantizers
from .cache import LayerCache, Quantize, Rule, Scheme, Side, by_channel, by_token
from .quantizers import WORD_THREES

GROUP = 32  # elements that share metadata, and tokens that leave full precision together
WIDE_GROUP = 3 * WORD_THREES  # elements that share metadata in 3-bit keys where a word has none of its own
K_BITS, V_BITS, LOW_BITS = 3, 4, 2  # of the layers with the highest scores, and of the rest
HIGH_RATIO, LOW_RATIO = 0.2, 0.1  # share of the full-precision tokens that stays so, by bits, as the paper has it
SHARE = 0.2  # of the layers, with more bits than the others
PROFILE_TOKENS = 1024  # first tokens of a text that are profiled


class HighLayers(NamedTuple):
    """The layers with more bits, K and V apart."""

    k: frozenset[int] = frozenset()
    v: frozenset[int] = frozenset()


def keep_share(ratio: float, group: int) -> Rule:
    """The window as coded: the newest ``int(ratio * full)`` full-precision tokens stay, and those that fill no group.

    Every step applies the rule to the tokens left by the last one, so a long window shrinks to a few in three steps.
    """
    return lambda full: (full - int(ratio * full)) // group * group


def layer(k_bits: int, v_bits: int, *, faithful: bool = True) -> LayerCache:
    """A layer's cache; tokens are quantized before a step attends.

    3-bit keys, ``faithful``: every word of 11 has its own step, and its last element saturates. Otherwise three words
    share a step, and the last element of each has its own.
    """
    three_group = WORD_THREES if faithful else WIDE_GROUP
    k_group = three_group if k_bits == 3 else GROUP
    keys = _three(faithful) if k_bits == 3 else _plain(k_bits)
    return LayerCache(
        Side(keep_share(_ratio(k_bits), k_group), by_channel(keys, k_group)),
        Side(keep_share(_ratio(v_bits), GROUP), by_token(_plain(v_bits), GROUP)),
        quantizes_first=True,
    )


def _plain(bits: int) -> Quantize:
    return lambda groups: quantizers.kvmix(groups, bits).values()


def _three(faithful: bool) -> Quantize:
    return lambda groups: quantizers.kvmix_three(groups, faithful=faithful).values()


def _ratio(bits: int) -> float:
    return HIGH_RATIO if bits > LOW_BITS else LOW_RATIO


def layer_bits(high: HighLayers, num_layers: int) -> list[tuple[int, int]]:
    """(K bits, V bits) of each layer."""
    return [(K_BITS if i in high.k else LOW_BITS, V_BITS if i in high.v else LOW_BITS) for i in range(num_layers)]


def top_layers(k_scores: Sequence[float], v_scores: Sequence[float], share: float = SHARE) -> HighLayers:
    """The ``share`` of the layers with the largest scores, rounded down but at least one, for K and V apart."""
    count = max(1, int(share * len(k_scores)))
    k, v = (sorted(range(len(s)), key=s.__getitem__, reverse=True)[:count] for s in (k_scores, v_scores))
    return HighLayers(frozenset(k), frozenset(v))


def gradient_scores(folder: Path, texts: Sequence[str]) -> tuple[list[float], list[float]]:
    """Scores of each layer's K and V: the L2 norm of the loss gradient with respect to W_k and W_v, mean over texts.

    One forward and backward pass a text with the labels in place; the release has two a layer, and labels shifted
    twice. The model is Hugging Face's, which autograd can follow.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    attentions = [block.self_attn for block in model.model.layers]
    k_scores, v_scores = [0.0] * len(attentions), [0.0] * len(attentions)
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :PROFILE_TOKENS]
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        for i, attention in enumerate(attentions):
            k_scores[i] += float(attention.k_proj.weight.grad.norm()) / len(texts)
            v_scores[i] += float(attention.v_proj.weight.grad.norm()) / len(texts)
    return k_scores, v_scores


def scheme(high: HighLayers, num_layers: int, *, faithful: bool = True) -> Scheme:
    """KVmix with these layers' bits, beside blocks of 128 tokens in groups of 32, 3 bits plain."""
    bits = layer_bits(high, num_layers)
    rung = RungConfig(
        "kvmix",
        k=tuple(f"int{k}-channel-{GROUP}" for k, _ in bits),
        v=tuple(f"int{v}-token-{GROUP}" for _, v in bits),
    )
    preset = KVConfig(name="kvmix blocks", rungs=(DENSE16, rung), eager=True)
    return Scheme(lambda i: layer(*bits[i], faithful=faithful), preset)
