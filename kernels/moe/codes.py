"""Launches of a mixture of experts whose matrices are quantized, and their parameters.

Few tokens: each pair of token and expert is a tile of its own, and nothing is sorted. More: as ``triton`` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..fusion import FUSED
from ..linear import PackedCodes
from ..linear.code_tile import OVERWRITES
from ..linear.codes import BLOCK
from ..overlap import overlap_options
from .code_kernel import expert_codes_kernel
from .experts import CodedExperts, Experts, Routing, SwiGLU
from .triton import Plan, combine, first_serving, sort_by_expert

PAIR_TILE = 8  # rows of a pair's tile, the fewest that tensor cores take


class CodeTile(NamedTuple):
    """Launch parameters of ``expert_codes_kernel``.

    Rows of the weight a program, columns of a step at most, steps under way; ``scaled``: integers of 4 bits are scaled
    in place of the sums of a group. ``slices``: parts of the columns, a warp each; 1: warps share them.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    scaled: bool = False
    slices: int = 1


class PairTiles(NamedTuple):
    """Both products, a tile a pair of token and expert."""

    gate_up: CodeTile
    down: CodeTile


class SortedTiles(NamedTuple):
    """Tokens of a tile at most, and both products."""

    block_m: int
    gate_up: CodeTile
    down: CodeTile


Tuning = PairTiles | SortedTiles

# By the bits of a code and the most tokens an expert, on average over all experts, that each serves; the fastest on an
# H200.
TUNINGS: dict[int, dict[float, Tuning]] = {
    4: {
        0.0625: PairTiles(CodeTile(32, 128, 4, 4, slices=4), CodeTile(32, 128, 4, 4, slices=4)),
        0.25: PairTiles(CodeTile(64, 256, 4, 3), CodeTile(16, 128, 2, 4, slices=2)),
        4.0: SortedTiles(8, CodeTile(64, 256, 4, 3), CodeTile(64, 256, 4, 3)),
        16.0: SortedTiles(16, CodeTile(64, 256, 2, 3), CodeTile(64, 256, 2, 3)),
        64.0: SortedTiles(32, CodeTile(64, 128, 2, 4), CodeTile(64, 128, 2, 4)),
        128.0: SortedTiles(64, CodeTile(128, 128, 8, 3, True), CodeTile(128, 128, 8, 3, True)),
        float("inf"): SortedTiles(128, CodeTile(128, 128, 8, 2, True), CodeTile(128, 128, 8, 2, True)),
    },
    8: {
        0.25: PairTiles(CodeTile(64, 64, 4, 6), CodeTile(16, 64, 2, 4, slices=2)),
        4.0: SortedTiles(8, CodeTile(64, 64, 4, 6), CodeTile(64, 64, 4, 6)),
        16.0: SortedTiles(16, CodeTile(64, 128, 2, 3), CodeTile(64, 128, 2, 3)),
        64.0: SortedTiles(32, CodeTile(64, 128, 2, 3), CodeTile(64, 128, 2, 3)),
        float("inf"): SortedTiles(128, CodeTile(64, 64, 4, 3), CodeTile(64, 64, 4, 3)),
    },
}


def can_multiply(x: Tensor, experts: Experts) -> bool:
    """Whether ``experts_mlp_codes`` takes the operands; otherwise matrices are written out."""
    weights = [part.weight for part in experts[:2] if isinstance(part, CodedExperts)]
    is_packed = [isinstance(weight, PackedCodes) and weight.order is None for weight in weights]
    return x.dtype.itemsize == 2 and len(weights) == 2 and all(is_packed)


def experts_mlp_codes(x: Tensor, routing: Routing, experts: Experts, *, tuning: Tuning | None = None) -> Tensor:
    """See ``experts_mlp``; the values of codes and all sums in float32. ``tuning``: launch parameters.

    Of 4-bit integers in groups, tiles of many tokens round the scaled elements to the dtype.
    """
    assert x.is_contiguous() and all(part.is_contiguous() for part in routing)
    if not len(x):
        return torch.empty_like(x)
    if tuning is None:
        bits = _codes(experts.gate_up).bits
        tuning = choose_tuning(len(x), routing.experts.shape[1], experts.num_experts, bits)
    plan = None
    if isinstance(tuning, SortedTiles):
        plan = sort_by_expert(routing, experts.num_experts, tuning.block_m)
    inner = gate_up_codes(x, routing, experts, plan, tuning)
    return combine(down_codes(inner, routing, experts, plan, tuning), routing)


def choose_tuning(num_rows: int, top_k: int, num_experts: int, bits: int) -> Tuning:
    """The first of ``TUNINGS`` that serves so many."""
    return first_serving(TUNINGS[bits], num_rows, top_k, num_experts)


def gate_up_codes(x: Tensor, routing: Routing, experts: Experts, plan: Plan | None, tuning: Tuning) -> Tensor:
    """Inner features [N K, I] of pairs of token and expert, in the plan's order or in their own."""
    inner = x.new_empty(routing.experts.numel(), experts.down.shape[2])
    _product(x, experts.gate_up, experts.gate_up_bias, inner, routing, plan, tuning, experts.activation)
    return inner


def down_codes(inner: Tensor, routing: Routing, experts: Experts, plan: Plan | None, tuning: Tuning) -> Tensor:
    """Outputs [N K, E] of pairs of token and expert; without a plan the kernel before is that of ``gate_up_codes``."""
    pairs = inner.new_empty(len(inner), experts.down.shape[1])
    _product(inner, experts.down, experts.down_bias, pairs, routing, plan, tuning, None)
    return pairs


def _product(
    x: Tensor,
    experts: Tensor | CodedExperts,
    bias: Tensor | None,
    out: Tensor,
    routing: Routing,
    plan: Plan | None,
    tuning: Tuning,
    activation: SwiGLU | None,
) -> None:
    weight, num_out = _codes(experts), experts.shape[1]
    assert not weight.is_blockwise or num_out % BLOCK == 0, "blocks of one expert"
    order, tiles = (routing.experts, None) if plan is None else plan
    constexprs, num_warps = codes_variant(weight, num_out, routing.experts.shape[1], activation, tuning)
    grid = triton.cdiv(num_out, constexprs["BLOCK_N"]), order.numel() if tiles is None else len(tiles)
    expert_codes_kernel[grid](
        x, weight.codes.view(torch.uint8), *weight.group_operands(), bias, out, order, tiles,
        **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED,
    )  # fmt: skip


def codes_variant(
    weight: PackedCodes, num_out: int, top_k: int, activation: SwiGLU | None, tuning: Tuning
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``expert_codes_kernel``, with ``activation`` of gate and up.

    Steps have as many spans each as makes them equal.
    """
    launch = tuning.down if activation is None else tuning.gate_up
    block_m = tuning.block_m if isinstance(tuning, SortedTiles) else PAIR_TILE
    paired = 2 if weight.kind == "float4" else 1
    number = triton.cdiv(weight.num_spans // paired, launch.slices)
    most = max(1, launch.block_k // (weight.span * paired))
    has_groups = weight.group < weight.num_columns
    is_scaled = weight.kind == "float4" or (weight.kind == "int4" and has_groups and launch.scaled)
    constexprs = {
        "N": num_out,
        "TOP_K": top_k,
        "ACTIVATION": activation,
        "BLOCK_M": block_m,
        "BLOCK_N": launch.block_n,
        "SLICES": launch.slices,
        "SPANS": paired * triton.cdiv(number, triton.cdiv(number, most)),
        "STAGES": launch.num_stages,
        "SCALED": is_scaled,
        "WAITS": OVERWRITES and (is_scaled or not has_groups),
    }
    return weight.constexprs | constexprs, launch.num_warps


def _codes(experts: Tensor | CodedExperts) -> PackedCodes:
    """The packed weight; ``can_multiply`` says that it is one."""
    assert isinstance(experts, CodedExperts) and isinstance(experts.weight, PackedCodes)
    return experts.weight
