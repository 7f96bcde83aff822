"""A plan layer by layer, for people: scores and bits of K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from qkv_engine.calibrate.plan import KVPlan
from qkv_engine.kernels.formats import make_format
from qkv_engine.kv.ladder import Ladder

from .table import Table, from_columns


@dataclass(frozen=True)
class LayerRow:
    """A layer of a plan: mean gradient norms of W_k and W_v, and format and code bits of K and V at the floor."""

    layer: int
    k_score: float
    v_score: float
    k: str
    v: str
    k_bits: float
    v_bits: float


def layer_rows(plan: KVPlan) -> list[LayerRow]:
    """The layers of ``plan`` in order."""
    floor, number = plan.ladder.rungs[-1], plan.model.num_layers
    k, v = ([side] * number if isinstance(side, str) else side for side in (floor.k, floor.v))
    scored = zip(plan.scores.k, plan.scores.v, k, v, strict=True)
    return [LayerRow(layer, *entry, _bits(entry[2]), _bits(entry[3])) for layer, entry in enumerate(scored)]


def plan_title(plan: KVPlan) -> str:
    """Model, method and texts."""
    choice = "layers at random" if plan.settings.random_seed is not None else "layers by gradient norm"
    texts = f"{plan.prompts.count} texts of {plan.prompts.source}"
    return f"{plan.model.name} · {plan.method}, {choice} · {texts}, {plan.prompts.tokens:,} tokens"


def plan_table(plan: KVPlan, rows: Sequence[LayerRow], ladder: Ladder) -> Table:
    """The table of a plan and what its ``ladder`` takes."""
    columns = {
        "layer": [str(row.layer) for row in rows],
        "K score": [f"{row.k_score:.3g}" for row in rows],
        "K bits": [f"{row.k_bits:g}" for row in rows],
        "V score": [f"{row.v_score:.3g}" for row in rows],
        "V bits": [f"{row.v_bits:g}" for row in rows],
        "K": [row.k for row in rows],
        "V": [row.v for row in rows],
    }
    return from_columns(plan_title(plan), columns, [_summary(rows, ladder)], spare=["V", "K"])


def _summary(rows: Sequence[LayerRow], ladder: Ladder) -> str:
    k, v = fmean(row.k_bits for row in rows), fmean(row.v_bits for row in rows)
    bits = ladder.narrowest.effective_bits
    return f"K {k:.5g} bits and V {v:.5g} on average, {bits:.2f} an element with metadata"


def _bits(name: str) -> float:
    return make_format(name, torch.float32).bits
