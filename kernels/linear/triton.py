"""Matrix product of few rows in Triton, at the speed at which the weight can be read.

Rows of the weight are all that is large. Launches overlap: weights are read before a program waits for the kernel
before it, ``x`` after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..nvidia import has_large_shared
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..product_parts import (
    VECTOR,
    load_bias,
    load_columns,
    power_of_2_below,
    store_row,
    store_sums,
    store_tile,
    weight_rows,
)
from .split_sums import SplitSums

Entry = TypeVar("Entry")


class SumTuning(NamedTuple):
    """Launch parameters of ``linear_sum_kernel``.

    ``columns`` of a row of the weight that a warp takes, at least: fewer make more warps share a row. ``loads`` of 16
    bytes that a thread has under way: more need more registers, so that fewer programs fit.
    """

    columns: int
    loads: int


class TileTuning(NamedTuple):
    """Launch parameters of ``linear_tile_kernel``: rows of ``x`` and of the weight a program, columns of a step, steps
    under way, and parts of the columns, a program each.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


SUMS = SumTuning(columns=1024, loads=16)  # of a lone row
ANY = math.inf
# By the most rows of ``x``, of which more take several tiles of the last entry, and by the most of the weight. Few rows
# of the weight leave multiprocessors idle, so that small tiles or deep steps win; of many several programs share one.
TILES: dict[int, dict[float, TileTuning]] = {
    8: {ANY: TileTuning(block_m=8, block_n=16, block_k=256, num_warps=1, num_stages=6)},
    16: {
        4096: TileTuning(block_m=16, block_n=16, block_k=512, num_warps=2, num_stages=4),
        8192: TileTuning(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=3),
        20_480: TileTuning(block_m=16, block_n=32, block_k=128, num_warps=2, num_stages=6),
        ANY: TileTuning(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
    },
    32: {
        16_384: TileTuning(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=5),
        ANY: TileTuning(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=3),
    },
    64: {
        4096: TileTuning(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=5),  # two read the same rows
        8192: TileTuning(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4),
        16_384: TileTuning(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3),
        ANY: TileTuning(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4),
    },
    128: {
        4096: TileTuning(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=6),
        ANY: TileTuning(block_m=128, block_n=64, block_k=64, num_warps=4, num_stages=5),
    },
}
# Torch's products are faster beyond: more than ``FEW_ROWS`` of a weight with many columns for its few rows, more than
# ``SOME_ROWS`` of one with many columns or rows.
FEW_ROWS, SOME_ROWS, MAX_ROWS = 16, 32, 64
NARROW, WIDE, MANY_COLUMNS = 4096, 16_384, 4096
# Of weights of up to ``NARROW`` rows, where the reader of the product adds splits up: by the most rows of ``x``, more
# than ``MOST_WHOLE``, and by the most columns, of which few leave few steps. They are for large shared memory alone.
SPLIT_TILES: dict[int, dict[float, TileTuning]] = {
    16: {
        4096: TileTuning(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
        ANY: TileTuning(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=6),
    },
    32: {
        4096: TileTuning(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4),
        ANY: TileTuning(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=5),
    },
    64: {
        4096: TileTuning(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3),
        ANY: TileTuning(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=5),
    },
}
MOST_WHOLE, MOST_SPLITS = 8, 4
SPLIT_PROGRAMS = 132  # one on each multiprocessor of an H200; splits make about as many


@triton.jit
def linear_sum_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, N,
    K: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = weight @ x + bias`` by multiplication and addition in float32, or with GATED its SwiGLU.

    A program holds BLOCK_N rows of the weight in registers, and all its loads are under way before it waits.

    Shapes:  x [K];  weight [N, K];  bias [N] or None;  out [N], with GATED [N / 2]
    Grid:    (cdiv(N, BLOCK_N),)
    """
    let_next_start(OVERLAP)
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    i_p, o_k = tl.program_id(0), tl.arange(0, BLOCK_K)
    o_n = weight_rows(i_p, N, GATED, False, BLOCK_N)
    p_weight = weight_ptr + o_n[:, None] * K
    weights = ()
    for part in tl.static_range(PARTS):
        b_weight = load_columns(p_weight, part * BLOCK_K + o_k[None, :], K, BLOCK_K, "evict_first")
        weights += (b_weight,)  # type: ignore[assignment]
    b_bias = load_bias(bias_ptr, o_n)
    wait_for_previous(OVERLAP)

    b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for part in tl.static_range(PARTS):
        b_x = load_columns(x_ptr, part * BLOCK_K + o_k, K, BLOCK_K, "")
        b_acc += weights[part].to(tl.float32) * b_x.to(tl.float32)[None, :]
    store_row(tl.sum(b_acc, 1), b_bias, out_ptr, i_p, N, GATED)


@triton.jit(do_not_specialize=["M"])
def linear_tile_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, N, M,
    K: tl.constexpr, GATED: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias`` on tensor cores, or with GATED its SwiGLU.

    With SPLITS each program has whole steps of the columns, and leaves a sum without the bias.

    Shapes:  x [M, K];  weight [N, K];  bias [N] or None
             out [M, N], with GATED [M, N / 2], with SPLITS float32 [SPLITS, M, N], where FULL
    Grid:    (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N), SPLITS): programs that read the same of the weight follow one another
    """
    let_next_start(OVERLAP)
    o_m, o_k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    i_p = tl.program_id(1)
    o_n = weight_rows(i_p, N, GATED, FULL, BLOCK_N)
    p_weight = weight_ptr + o_n[:, None] * K
    b_bias = load_bias(bias_ptr, o_n)
    p_x, m_m = x_ptr + o_m[:, None] * K, (o_m < M)[:, None]
    PART: tl.constexpr = K // SPLITS
    if SPLITS > 1:
        p_weight, p_x = p_weight + tl.program_id(2) * PART, p_x + tl.program_id(2) * PART
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_previous(OVERLAP)

    for i in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        b_weight = load_columns(p_weight, i + o_k[None, :], K, BLOCK_K, "evict_first")
        m_x = m_m if K % BLOCK_K == 0 else m_m & (i + o_k < K)[None, :]
        b_x = tl.load(p_x + i + o_k[None, :], mask=m_x, other=0.0)
        b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc, input_precision="ieee")
    if SPLITS > 1:
        store_sums(b_acc, out_ptr, i_p, tl.num_programs(1), o_m, o_m < M, M)
    else:
        store_tile(b_acc, b_bias, out_ptr, i_p, o_m, o_m < M, N, GATED)


def can_stream(x: Tensor, weight: Tensor) -> bool:
    """Whether ``linear_few_rows`` takes the operands and is fast: few rows of whole vectors, no gradient to come."""
    needs_grad = x.requires_grad or weight.requires_grad
    return _has_vectors(x) and not needs_grad and is_faster(len(x), *weight.shape)


def can_split(x: Tensor, weight: Tensor) -> bool:
    """Whether ``linear_splits`` takes the operands, and is faster where the reader of the product adds splits up.

    Never while gradients are recorded: what keeps or adds up a layer's input then asks for one tensor.
    """
    is_taken = has_large_shared(x.device) and _has_vectors(x) and not torch.is_grad_enabled()
    return is_taken and split_tile(len(x), *weight.shape) is not None


def is_faster(num_rows: int, num_out: int, size: int) -> bool:
    """Whether ``linear_few_rows`` is faster than torch's product with a weight [num_out, size], as far as measured."""
    if num_rows <= SOME_ROWS:
        return num_rows > 0 and (num_rows <= FEW_ROWS or num_out > NARROW or size <= MANY_COLUMNS)
    return num_rows <= MAX_ROWS and num_out < WIDE and size <= MANY_COLUMNS


def _has_vectors(x: Tensor) -> bool:
    return x.dtype.itemsize == 2 and x.shape[1] % VECTOR == 0 and x.is_contiguous()


def linear_few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    tuning: SumTuning | TileTuning | None = None,
) -> Tensor:
    """See ``linear``, and ``linear_swiglu`` for a ``gated`` one; x has 1 to ``MAX_ROWS`` rows.

    ``tuning``: launch parameters, and with them the kernel; ``SumTuning`` serves one row alone.
    """
    num_rows, size = x.shape
    num_out = len(weight)
    assert 0 < num_rows <= MAX_ROWS and _has_vectors(x) and weight.is_contiguous()
    out = x.new_empty(num_rows, num_out // 2 if gated else num_out)
    kernel, constexprs, num_warps = few_rows_variant(num_rows, num_out, size, gated=gated, tuning=tuning)
    if kernel is linear_tile_kernel:
        assert constexprs["SPLITS"] == 1
        launch_tiles(x, weight, bias, out, constexprs, num_warps)
        return out
    options = {"num_warps": num_warps, **overlap_options(x.device)}
    grid = (triton.cdiv(num_out, constexprs["BLOCK_N"]),)
    kernel[grid](x, weight, bias, out, num_out, **constexprs, **options, **FUSED)
    return out


def linear_splits(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tuning: TileTuning | None = None
) -> SplitSums:
    """``linear`` where ``can_split``, before splits of the columns are added up.

    ``tuning``: launch parameters, whose tiles and steps are whole.
    """
    (num_rows, size), num_out = x.shape, len(weight)
    tuning = tuning or split_tile(num_rows, num_out, size)
    assert tuning is not None and tuning.splits > 1 and _has_vectors(x) and weight.is_contiguous()
    assert num_out % tuning.block_n == 0 and size % (tuning.splits * tuning.block_k) == 0
    sums = x.new_empty(tuning.splits, num_rows, num_out, dtype=torch.float32)
    launch_tiles(x, weight, None, sums, *tile_variant(num_out, size, tuning, gated=False))
    return SplitSums(sums, bias)


def launch_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, constexprs: dict[str, Any], num_warps: int
) -> None:
    """Writes the product, its SwiGLU or its splits, of any number of rows, to ``out`` by ``linear_tile_kernel``."""
    num_rows, num_out = len(x), len(weight)
    tiles = triton.cdiv(num_rows, constexprs["BLOCK_M"]), triton.cdiv(num_out, constexprs["BLOCK_N"])
    grid = *tiles, constexprs["SPLITS"]
    options = {"num_warps": num_warps, **overlap_options(x.device)}
    linear_tile_kernel[grid](x, weight, bias, out, num_out, num_rows, **constexprs, **options, **FUSED)


def few_rows_variant(
    num_rows: int, num_out: int, size: int, *, gated: bool = False, tuning: SumTuning | TileTuning | None = None
) -> tuple[Any, dict[str, Any], int]:
    """Kernel, compile-time arguments and warps for ``num_rows`` of ``size`` and a weight [num_out, size]."""
    if tuning is None:
        tuning = SUMS if num_rows == 1 else tile_of(num_rows, num_out)
    if isinstance(tuning, TileTuning):
        return linear_tile_kernel, *tile_variant(num_out, size, tuning, gated=gated)
    constexprs, num_warps = _sum_variant(size, tuning)
    return linear_sum_kernel, {"K": size, "GATED": gated, **constexprs}, num_warps


def tile_of(num_rows: int, num_out: int) -> TileTuning:
    """The fastest tile for rows of ``x`` and of the weight."""
    return _find(_find(TILES, num_rows), num_out)


def split_tile(num_rows: int, num_out: int, size: int) -> TileTuning | None:
    """The tile and splits of a product whose reader adds splits up; None where that is not faster, as far as measured.

    Splits are the number, of those that divide the steps, that comes nearest to ``SPLIT_PROGRAMS``.
    """
    if not MOST_WHOLE < num_rows <= MAX_ROWS or num_out > NARROW:
        return None
    tile = _find(_find(SPLIT_TILES, num_rows), size)
    if num_out % tile.block_n or size % tile.block_k:
        return None
    tiles, steps = num_out // tile.block_n, size // tile.block_k
    divisors = (splits for splits in range(1, MOST_SPLITS + 1) if steps % splits == 0)
    splits = min(divisors, key=lambda splits: abs(splits * tiles - SPLIT_PROGRAMS))
    return tile._replace(splits=splits) if splits > 1 else None


def _find(table: Mapping[Any, Entry], number: int) -> Entry:
    """The entry of the smallest key that ``number`` does not exceed; of the largest key where it exceeds all."""
    return table[min((most for most in table if number <= most), default=max(table))]


def _sum_variant(size: int, tuning: SumTuning) -> tuple[dict[str, Any], int]:
    num_warps = min(16, max(1, power_of_2_below(size // tuning.columns)))
    block_k = num_warps * 32 * VECTOR
    rows = tuning.loads // triton.cdiv(size, block_k)
    block_n = min(8, max(2, power_of_2_below(rows)))  # of short rows not more: small weights want many programs
    return {"BLOCK_N": block_n, "BLOCK_K": block_k}, num_warps


def tile_variant(num_out: int, size: int, tuning: TileTuning, *, gated: bool) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``linear_tile_kernel`` for a weight [num_out, size]."""
    block_m, block_n, block_k, num_warps, num_stages, splits = tuning
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": num_stages, "SPLITS": splits}
    return {"K": size, "GATED": gated, "FULL": num_out % block_n == 0, **blocks}, num_warps
