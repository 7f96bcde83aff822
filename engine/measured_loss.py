"""Losses of formats as they were measured on the demo model: an order of formats, not the truth about another model.

KL divergence of the next token's distribution from that of 16 bits, in nats a token, under teacher forcing: mean of
eight sets of texts (docs/accuracy.md, docs/weights.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .presets import PRESETS

if TYPE_CHECKING:
    from .config import KVConfig
    from .device.layouts import Ladder

KV = {  # by preset, all blocks on its last rung
    "int8": 0.00000047,  # results/cpu/judge-weights-demo.jsonl; the others: results/cpu/judge-demo.jsonl
    "kivi-4": 0.000083,
    "int4": 0.00013,
    "kitty-pro": 0.0030,
    "patternkv-sink": 0.0046,
    "kitty": 0.0090,
    "kivi-2-sink": 0.031,
    "kivi-2": 0.033,
    "xquant": 0.13,
}
WEIGHTS = {  # by the option ``weights``, beside KV at 16 bits: results/cpu/judge-weights-demo.jsonl
    "int8": 0.00000057,
    "fp8": 0.0000034,
    "int4": 0.000062,
}


def measured_kv_loss(kv: KVConfig, ladder: Ladder, rung: int) -> float | None:
    """The loss of blocks on a rung; None for one that was not measured. Dense rungs lose nothing that counts."""
    if all(each.is_dense for each in ladder.at(rung)):
        return 0.0
    if rung == ladder.last and kv.name in KV and kv == PRESETS.get(kv.name):
        return KV[kv.name]
    like = PRESETS.get(ladder.names[rung])  # rungs of ``auto`` have the names of presets
    is_alike = (
        like is not None and (like.sink, like.window) == (kv.sink, kv.window) and like.rungs[-1] == kv.rungs[rung]
    )
    return KV.get(like.name) if like is not None and is_alike else None


def measured_weights_loss(name: str | None) -> float | None:
    """The loss of an option ``weights``, none of weights as they are stored; None for one that was not measured."""
    return 0.0 if name is None else WEIGHTS.get(name)
