"""Launches of the mixture of experts' kernels, and their parameters.

Few tokens: two launches, each token reads its own experts. More: pairs of token and expert are sorted by expert, the
two products run over tiles of one expert's tokens, which read its weight once, and a last launch sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from ..fusion import FUSED
from ..overlap import overlap_options
from ..product_parts import VECTOR, power_of_2_below
from .experts import CodedExperts, Experts, Routing, SoftmaxOver, SwiGLU
from .route_kernel import route_kernel, sort_kernel
from .sum_kernel import down_sum_kernel, gate_up_sum_kernel
from .tile_kernel import combine_kernel, expert_tile_kernel

T = TypeVar("T")

COMBINE_TILE = 1024


class Sum(NamedTuple):
    """Launch parameters of a sum kernel.

    ``columns`` of a row of the weight that a warp takes, at least; ``rows`` a program, at most; ``loads`` of 16 bytes
    that a thread has under way.
    """

    columns: int
    rows: int
    loads: int


class Tile(NamedTuple):
    """Launch parameters of ``expert_tile_kernel``: rows of the weight a program, columns of a step, steps under way."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ExpertSums(NamedTuple):
    """Both products of few tokens."""

    gate_up: Sum
    down: Sum


class ExpertTiles(NamedTuple):
    """Tokens of a tile at most, and both products."""

    block_m: int
    gate_up: Tile
    down: Tile


Tuning = ExpertSums | ExpertTiles

# By the most tokens an expert, on average over all experts, that each serves; the last serves all larger numbers.
TUNINGS: dict[float, Tuning] = {
    0.125: ExpertSums(Sum(columns=1024, rows=4, loads=16), Sum(columns=512, rows=2, loads=24)),
    1.0: ExpertTiles(8, Tile(32, 256, 2, 5), Tile(32, 256, 2, 3)),
    4.0: ExpertTiles(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)),
    16.0: ExpertTiles(32, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
    64.0: ExpertTiles(64, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
    float("inf"): ExpertTiles(128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
}


class Plan(NamedTuple):
    """Pairs of token and expert in the order of experts, and tiles of them: ``sort_kernel``'s results."""

    order: Tensor
    tiles: Tensor


def route_triton(logits: Tensor, top_k: int, over: SoftmaxOver) -> Routing:
    """See ``route``."""
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous() and 0 < top_k <= num_experts
    experts = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        constexprs, num_warps = route_variant(num_experts, top_k, over)
        options = overlap_options(logits.device)
        route_kernel[(num_rows,)](logits, experts, weights, **constexprs, num_warps=num_warps, **options, **FUSED)
    return Routing(experts, weights)


def experts_mlp_triton(x: Tensor, routing: Routing, experts: Experts, *, tuning: Tuning | None = None) -> Tensor:
    """See ``experts_mlp``; quantized matrices are written out. ``tuning``: launch parameters, and with them kernels."""
    gate_up, down = experts.plain(x.dtype)
    assert x.is_contiguous() and all(part.is_contiguous() for part in (*routing, gate_up, down))
    experts = experts._replace(gate_up=gate_up, down=down)
    if not len(x):
        return torch.empty_like(x)
    if tuning is None:
        tuning = choose_tuning(len(x), routing.experts.shape[1], experts.num_experts)
    if isinstance(tuning, ExpertSums):
        return _few_tokens(x, routing, experts, tuning)
    return _many_tokens(x, routing, experts, tuning)


def sort_by_expert(routing: Routing, num_experts: int, block_m: int) -> Plan:
    """The plan of a layer, of a shape that depends on the number of tokens alone."""
    chosen = routing.experts
    most = most_tiles(chosen.shape[0], chosen.shape[1], num_experts, block_m)
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(most, 4, dtype=torch.int32, device=chosen.device)
    constexprs, num_warps = sort_variant(chosen.numel(), num_experts, block_m)
    options = overlap_options(chosen.device)
    sort_kernel[(num_experts,)](
        chosen, order, tiles, chosen.numel(), most, **constexprs, num_warps=num_warps, **options, **FUSED
    )
    return Plan(order, tiles)


def most_tiles(num_rows: int, top_k: int, num_experts: int, block_m: int) -> int:
    """The most tiles of ``block_m`` tokens that ``num_rows`` tokens with ``top_k`` distinct experts can have."""
    pairs = num_rows * top_k
    touched = min(pairs, num_experts)
    return min(touched + (pairs - touched) // block_m, num_experts * triton.cdiv(num_rows, block_m))


def choose_tuning(num_rows: int, top_k: int, num_experts: int) -> Tuning:
    """The first of ``TUNINGS`` that serves so many."""
    return first_serving(TUNINGS, num_rows, top_k, num_experts)


def first_serving(tunings: Mapping[float, T], num_rows: int, top_k: int, num_experts: int) -> T:
    """Of ``tunings`` by the most tokens an expert; one token reads each weight once, however few experts there are."""
    tokens_an_expert = num_rows * top_k / num_experts if num_rows > 1 else 0.0
    return next(tuning for most, tuning in tunings.items() if tokens_an_expert <= most)


def _few_tokens(x: Tensor, routing: Routing, experts: Experts, tuning: ExpertSums) -> Tensor:
    inner = gate_up_sums(x, routing, experts, tuning.gate_up)
    return down_sums(inner, routing, experts, tuning.down)


def gate_up_sums(x: Tensor, routing: Routing, experts: Experts, launch: Sum) -> Tensor:
    """Inner features [N K, I] of pairs of token and expert."""
    (num_rows, top_k), (size, inner_size) = routing.experts.shape, experts.down.shape[1:]
    inner = x.new_empty(num_rows * top_k, inner_size)
    constexprs, num_warps = gate_up_sum_variant(size, inner_size, top_k, experts.activation, launch)
    gate_up_sum_kernel[(triton.cdiv(2 * inner_size, constexprs["BLOCK_N"]), num_rows * top_k)](
        x, experts.gate_up, experts.gate_up_bias, inner, routing.experts,
        **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED,
    )  # fmt: skip
    return inner


def down_sums(inner: Tensor, routing: Routing, experts: Experts, launch: Sum) -> Tensor:
    """The layer's result [N, E]; the kernel right before must be that of ``gate_up_sums``."""
    (num_rows, top_k), (size, inner_size) = routing.experts.shape, experts.down.shape[1:]
    out = inner.new_empty(num_rows, size)
    constexprs, num_warps = down_sum_variant(size, inner_size, top_k, launch)
    down_sum_kernel[(triton.cdiv(size, constexprs["BLOCK_N"]), num_rows)](
        inner, experts.down, experts.down_bias, out, *routing,
        **constexprs, num_warps=num_warps, **overlap_options(inner.device), **FUSED,
    )  # fmt: skip
    return out


def _many_tokens(x: Tensor, routing: Routing, experts: Experts, tuning: ExpertTiles) -> Tensor:
    plan = sort_by_expert(routing, experts.num_experts, tuning.block_m)
    inner = gate_up_tiles(x, routing, experts, plan, tuning)
    return combine(down_tiles(inner, routing, experts, plan, tuning), routing)


def gate_up_tiles(x: Tensor, routing: Routing, experts: Experts, plan: Plan, tuning: ExpertTiles) -> Tensor:
    """Inner features [N K, I] of pairs of token and expert, in the plan's order."""
    inner = x.new_empty(routing.experts.numel(), experts.down.shape[2])
    _tile_product(x, experts.gate_up, experts.gate_up_bias, inner, routing, plan, tuning, experts.activation)
    return inner


def down_tiles(inner: Tensor, routing: Routing, experts: Experts, plan: Plan, tuning: ExpertTiles) -> Tensor:
    """Outputs [N K, E] of pairs of token and expert."""
    pairs = inner.new_empty(len(inner), experts.down.shape[1])
    _tile_product(inner, experts.down, experts.down_bias, pairs, routing, plan, tuning, None)
    return pairs


def _tile_product(
    x: Tensor,
    weight: Tensor | CodedExperts,
    bias: Tensor | None,
    out: Tensor,
    routing: Routing,
    plan: Plan,
    tuning: ExpertTiles,
    activation: SwiGLU | None,
) -> None:
    num_out, num_in = weight.shape[1:]
    launch = tuning.down if activation is None else tuning.gate_up
    top_k, itemsize = routing.experts.shape[1], x.dtype.itemsize
    constexprs, num_warps = tile_variant(num_out, num_in, top_k, activation, tuning.block_m, launch, itemsize)
    expert_tile_kernel[(triton.cdiv(num_out, launch.block_n), len(plan.tiles))](
        x, weight, bias, out, *plan, **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED
    )


def combine(pairs: Tensor, routing: Routing) -> Tensor:
    """The weighted sum [N, E] of each token's pairs."""
    (num_rows, top_k), size = routing.experts.shape, pairs.shape[1]
    out = pairs.new_empty(num_rows, size)
    constexprs, num_warps = combine_variant(size, top_k)
    combine_kernel[(num_rows * triton.cdiv(size, COMBINE_TILE),)](
        pairs, routing.weights, out, **constexprs, num_warps=num_warps, **overlap_options(pairs.device), **FUSED
    )
    return out


def route_variant(num_experts: int, top_k: int, over: SoftmaxOver) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``route_kernel``."""
    blocks = {"BLOCK_X": triton.next_power_of_2(num_experts), "BLOCK_K": triton.next_power_of_2(top_k)}
    return {"X": num_experts, "TOP_K": top_k, "OVER_ALL": over is SoftmaxOver.ALL, **blocks}, 1


def sort_variant(num_pairs: int, num_experts: int, block_m: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``sort_kernel``: one of three sizes of a step."""
    block_a = next((size for size in (128, 512) if num_pairs <= size), 2048)
    block_x = triton.next_power_of_2(num_experts + 1)  # one more, for pairs beyond the last
    return {"X": num_experts, "BLOCK_X": block_x, "BLOCK_A": block_a, "BLOCK_M": block_m}, 8 if block_a > 512 else 4


def gate_up_sum_variant(
    size: int, inner: int, top_k: int, activation: SwiGLU, launch: Sum
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``gate_up_sum_kernel``."""
    blocks, num_warps, _ = _sum_blocks(size, launch)
    return {"E": size, "INNER": inner, "TOP_K": top_k, "ACTIVATION": activation, **blocks}, num_warps


def down_sum_variant(size: int, inner: int, top_k: int, launch: Sum) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``down_sum_kernel``."""
    blocks, num_warps, step = _sum_blocks(inner, launch)
    return {"E": size, "INNER": inner, "TOP_K": top_k, "STEP": min(top_k, step), **blocks}, num_warps


def _sum_blocks(size: int, launch: Sum) -> tuple[dict[str, int], int, int]:
    """Rows and columns of a block, warps, and experts under way, for rows of ``size``."""
    num_warps = min(16, max(1, power_of_2_below(size // launch.columns)))
    block_k = num_warps * 32 * VECTOR
    parts = triton.cdiv(size, block_k)
    block_n = min(launch.rows, max(2, power_of_2_below(launch.loads // parts)))
    return {"BLOCK_N": block_n, "BLOCK_K": block_k}, num_warps, max(1, launch.loads // (block_n * parts))


def tile_variant(
    num_out: int, num_in: int, top_k: int, activation: SwiGLU | None, block_m: int, launch: Tile, itemsize: int = 2
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``expert_tile_kernel``, with ``activation`` of gate and up.

    Steps have the same bytes in every dtype, so that float32 finds room in shared memory.
    """
    constexprs = {"N": num_out, "K": num_in, "TOP_K": top_k, "ACTIVATION": activation, "BLOCK_M": block_m}
    blocks = {"BLOCK_N": launch.block_n, "BLOCK_K": launch.block_k * 2 // itemsize, "STAGES": launch.num_stages}
    return {**constexprs, **blocks}, launch.num_warps


def combine_variant(size: int, top_k: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``combine_kernel``."""
    return {"E": size, "TOP_K": top_k, "TILE": COMBINE_TILE}, 4
