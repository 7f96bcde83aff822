"""Layers of experts with quantized weights for benchmarks, their kernels compiled, and launch parameters to try."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.linear import Float4Weight, PackedCodes, weight_nbytes
from qkv_engine.kernels.linear.codes import FLOAT4_GROUP
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.moe import CodedExperts, Experts, Routing, SoftmaxOver, SwiGLU, route
from qkv_engine.kernels.moe import triton as moe
from qkv_engine.kernels.moe.code_kernel import expert_codes_kernel
from qkv_engine.kernels.moe.codes import TUNINGS, CodeTile, PairTiles, SortedTiles, Tuning, choose_tuning, codes_variant
from qkv_engine.kernels.moe.route_kernel import route_kernel, sort_kernel
from qkv_engine.kernels.moe.sum_kernel import down_sum_kernel, gate_up_sum_kernel
from qkv_engine.kernels.moe.tile_kernel import combine_kernel, expert_tile_kernel
from qkv_engine.kernels.overlap import overlap_options
from qkv_engine.kernels.paged_decode.triton import Tuning as Launch

from .code_weights import random_weight

BF16 = torch.bfloat16


class Shape(NamedTuple):
    """Experts of a layer; ``group``: columns that share a scale, of 4-bit integers."""

    size: int
    inner: int
    num: int
    top_k: int
    group: int
    activation: SwiGLU = SwiGLU()
    bias: bool = False

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """Of biases, where there are some."""
        return BF16 if self.bias else None

    def rows_and_columns(self, *, gated: bool) -> tuple[int, int]:
        """Of one expert's matrix."""
        return (2 * self.inner, self.size) if gated else (self.size, self.inner)


class Layer(NamedTuple):
    """One call's operands."""

    x: Tensor
    routing: Routing
    experts: Experts


COMPILED = {"float4": "gpt-oss-20b", "int4": "qwen3-30b-a3b", "int8": "qwen3-30b-a3b", "float8 blocks": "qwen3-30b-a3b"}
Job = tuple[Any, ...]  # a function that compiles, and its arguments but launch options
FOUR_BITS = ("int4", "float4")
SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, 128),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, 64, SwiGLU(alpha=1.702, limit=7.0, shift=1.0), bias=True),
}
# Launch parameters to try, by tokens of a tile (0: pairs): rows of the weight, columns of 4 bits, warps, stages and
# slices.
FEW = (
    *((32, 128, 4, 4, 4), (32, 128, 4, 3, 4), (16, 128, 4, 4, 4), (16, 256, 4, 3, 4), (32, 256, 4, 3, 4)),
    *((32, 256, 2, 3, 2), (64, 256, 4, 3, 1), (64, 128, 4, 6, 1), (64, 256, 2, 3, 1)),
)
TILES = {
    0: (*FEW, (128, 256, 4, 3, 1), (16, 128, 2, 4, 2), (32, 256, 1, 4, 1)),
    8: (*FEW, (128, 256, 4, 3, 1)),
    16: (*FEW, (64, 128, 2, 4, 1), (32, 256, 2, 4, 1), (64, 256, 2, 3, 2)),
    32: (
        *((64, 256, 4, 3, 1), (64, 128, 4, 4, 1), (64, 256, 2, 3, 1), (64, 128, 2, 4, 1), (128, 128, 8, 4, 1)),
        *((128, 128, 4, 3, 1), (32, 128, 4, 3, 4)),
    ),
    64: ((64, 128, 4, 3, 1), (64, 128, 4, 4, 1), (128, 128, 8, 3, 1), (128, 128, 4, 3, 1), (128, 64, 4, 4, 1)),
    128: ((64, 128, 4, 3, 1), (128, 128, 8, 2, 1), (128, 128, 8, 3, 1), (64, 128, 4, 2, 1)),
}


def fits(kind: str, shape: Shape) -> bool:
    """Whether blocks of 128 x 128 are those of one expert."""
    return kind != "float8 blocks" or (shape.size % 128 == 0 and 2 * shape.inner % 128 == 0)


def candidates(kind: str, block_m: int) -> Iterator[CodeTile]:
    """Launch parameters to try; an 8-bit code has half the columns in as many bytes."""
    for block_n, block_k, num_warps, num_stages, slices in TILES[block_m]:
        columns = block_k if kind in FOUR_BITS else block_k // 2
        if kind != "int4" or block_m < 64:
            yield CodeTile(block_n, columns, num_warps, num_stages, slices=slices)
        if kind == "int4" and block_m >= 32 and num_warps >= 4 and slices == 1:
            yield CodeTile(block_n, columns, num_warps, num_stages, scaled=True)


def tuning_of(block_m: int, gate_up: CodeTile, down: CodeTile) -> Tuning:
    return SortedTiles(block_m, gate_up, down) if block_m else PairTiles(gate_up, down)


def make_codes(kind: str, shape: Shape, *, gated: bool) -> PackedCodes:
    """Random packed codes of all experts, on the default device."""
    rows, columns = shape.rows_and_columns(gated=gated)
    rows *= shape.num
    if kind == "float4":
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        return pack(Float4Weight(codes, torch.randint(118, 122, (rows, columns // FLOAT4_GROUP), dtype=torch.uint8)))
    return pack(random_weight(f"int4/{shape.group}" if kind == "int4" else kind, rows, columns))


def make_experts(kind: str, shape: Shape) -> Experts:
    """Random experts on the GPU, of whose products float16 would hold the sums."""

    def matrices(*, gated: bool) -> Tensor | CodedExperts:
        rows, columns = shape.rows_and_columns(gated=gated)
        if kind == "bf16":
            return torch.randn(shape.num, rows, columns, dtype=BF16).mul_(columns**-0.5)
        return CodedExperts(make_codes(kind, shape, gated=gated), shape.num)

    gate_up_bias, down_bias = (
        torch.randn(shape.num, n, dtype=BF16) if shape.bias else None for n in (2 * shape.inner, shape.size)
    )
    return Experts(matrices(gated=True), matrices(gated=False), gate_up_bias, down_bias, shape.activation)


def make_layers(shape: Shape, weights: list[Experts], tokens: int, routings: int) -> list[Layer]:
    """Every copy of the weights with several routings."""
    found = []
    for experts in weights * routings:
        routing = route(torch.randn(tokens, shape.num), shape.top_k, SoftmaxOver.CHOSEN)
        found.append(Layer(torch.randn(tokens, shape.size, dtype=BF16), routing, experts))
    return found


def expert_nbytes(experts: Experts) -> float:
    """Bytes of one expert's matrices."""
    parts = [part.weight if isinstance(part, CodedExperts) else part for part in experts[:2]]
    return sum(weight_nbytes(part) for part in parts) / experts.num_experts


def launched(kind: str, shape: Shape, numbers: list[int]) -> Iterator[Job]:
    """Kernels that the engine launches for these numbers of tokens."""
    yield compile_route, shape
    for tokens in numbers:
        if kind == "bf16":
            plain = moe.choose_tuning(tokens, shape.top_k, shape.num)
            yield compile_sums if isinstance(plain, moe.ExpertSums) else compile_tiles, shape, plain
            if isinstance(plain, moe.ExpertTiles):
                yield compile_sort, shape, tokens, plain.block_m
        else:
            tuning = choose_tuning(tokens, shape.top_k, shape.num, 4 if kind in FOUR_BITS else 8)
            yield compile_codes, kind, shape, tuning
            if isinstance(tuning, SortedTiles):
                yield compile_sort, shape, tokens, tuning.block_m


def tried(kind: str, shape: Shape, tokens: int, block_ms: set[int]) -> Iterator[Job]:
    """Kernels to try."""
    for block_m in block_ms:
        if block_m:
            yield compile_sort, shape, tokens, block_m
        for tile in candidates(kind, block_m):
            yield compile_codes, kind, shape, tuning_of(block_m, tile, tile)


def compile_one(job: Job) -> str | None:
    """Compiles into Triton's cache, which processes share; what went wrong."""
    function, *args = job
    try:
        function(*args, overlap_options(torch.device("cuda", 0)) | FUSED)
    except Exception as error:
        return f"{args}: {type(error).__name__}: {error}"[:300]
    return None


def compile_codes(kind: str, shape: Shape, tuning: Tuning, options: dict[str, Any]) -> None:
    """Both products with quantized weights."""
    for gated in (True, False):
        rows, _ = shape.rows_and_columns(gated=gated)
        with torch.device("meta"):
            weight = make_codes(kind, shape._replace(num=1), gated=gated)
        constexprs, warps = codes_variant(weight, rows, shape.top_k, shape.activation if gated else None, tuning)
        tiles = torch.int32 if isinstance(tuning, SortedTiles) else None
        scales, _ = weight.group_operands()
        pointers = BF16, torch.uint8, scales.dtype, None, shape.bias_dtype, BF16, torch.int32, tiles
        launch = constexprs | {"ASM": True, "num_warps": warps} | options
        expert_codes_kernel.warmup(*pointers, grid=(1, 1), **launch)


def coded_experts_kernels(*, overlap: bool = True) -> Iterator[tuple[str, Any, dict[str, Any], Launch]]:
    """Products of quantized experts with every launch, for ``studies.kernels.compiled``."""
    for kind, name in COMPILED.items():
        shape, tunings = SHAPES[name], TUNINGS[4 if kind in FOUR_BITS else 8]
        for (most, tuning), gated in product(tunings.items(), (True, False)):
            with torch.device("meta"):
                weight = make_codes(kind, shape._replace(num=1), gated=gated)
            rows, activation = shape.rows_and_columns(gated=gated)[0], shape.activation if gated else None
            constexprs, warps = codes_variant(weight, rows, shape.top_k, activation, tuning)
            constexprs |= {"ASM": True, "OVERLAP": overlap, "zeros_ptr": None}
            if not shape.bias:
                constexprs["bias_ptr"] = None
            if isinstance(tuning, PairTiles):
                constexprs["tiles_ptr"] = None
            launch = Launch(warps, constexprs["STAGES"])
            yield f"experts {kind} {'gate_up' if gated else 'down'} {most}", expert_codes_kernel, constexprs, launch


def compile_tiles(shape: Shape, tuning: moe.ExpertTiles, options: dict[str, Any]) -> None:
    """Both plain products of many tokens."""
    for tile, gated in ((tuning.gate_up, True), (tuning.down, False)):
        activation = shape.activation if gated else None
        size = shape.rows_and_columns(gated=gated)
        constexprs, warps = moe.tile_variant(*size, shape.top_k, activation, tuning.block_m, tile)
        operands = BF16, BF16, shape.bias_dtype, BF16, torch.int32, torch.int32
        expert_tile_kernel.warmup(*operands, grid=(1,), num_warps=warps, **constexprs, **options)


def compile_sums(shape: Shape, tuning: moe.ExpertSums, options: dict[str, Any]) -> None:
    """Both plain products of few tokens."""
    size, operands = (shape.size, shape.inner, shape.top_k), (BF16, BF16, shape.bias_dtype, BF16, torch.int32)
    constexprs, warps = moe.gate_up_sum_variant(*size, shape.activation, tuning.gate_up)
    gate_up_sum_kernel.warmup(*operands, grid=(1,), num_warps=warps, **constexprs, **options)
    constexprs, warps = moe.down_sum_variant(*size, tuning.down)
    down_sum_kernel.warmup(*operands, torch.float32, grid=(1,), num_warps=warps, **constexprs, **options)


def compile_sort(shape: Shape, tokens: int, block_m: int, options: dict[str, Any]) -> None:
    """The plan of a layer."""
    number, int32 = tokens * shape.top_k, torch.int32
    constexprs, warps = moe.sort_variant(number, shape.num, block_m)
    sort_kernel.warmup(int32, int32, int32, number, 1, grid=(1,), num_warps=warps, **constexprs, **options)


def compile_route(shape: Shape, options: dict[str, Any]) -> None:
    """The router's choice, and the weighted sum."""
    constexprs, warps = moe.route_variant(shape.num, shape.top_k, SoftmaxOver.CHOSEN)
    operands = torch.float32, torch.int32, torch.float32
    route_kernel.warmup(*operands, grid=(1,), num_warps=warps, **constexprs, **options)
    constexprs, warps = moe.combine_variant(shape.size, shape.top_k)
    combine_kernel.warmup(BF16, torch.float32, BF16, grid=(1,), num_warps=warps, **constexprs, **options)
