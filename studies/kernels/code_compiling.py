"""Kernels of products with quantized weights compiled in several processes, which share Triton's cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from multiprocessing.pool import Pool
from typing import NamedTuple

import torch

from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.linear.code_sum import code_sum_kernel
from qkv_engine.kernels.linear.float8 import MIN_ROWS, Float8Tuning, scaled_variant
from qkv_engine.kernels.linear.float8_tile import float8_tile_kernel
from qkv_engine.kernels.linear.integer import MAX_TILE_ROWS, code_tuning, code_variant
from qkv_engine.kernels.linear.packed import PackedCodes, pack
from qkv_engine.kernels.nvidia import has_large_shared
from qkv_engine.kernels.overlap import overlap_options

from .code_checks import checks
from .code_tunings import AnyTuning
from .code_weights import GROUP, print_line, random_weight

KINDS = ("int4", "int8", "float8")


class Wanted(NamedTuple):
    """One kernel to compile; with a bias where the dtype is said."""

    kind: str
    shape: tuple[int, int]
    num_rows: int
    gated: bool
    tuning: AnyTuning | None = None
    dtype: torch.dtype | None = None


def compile_kernel(wanted: Wanted) -> str | None:
    """Compiles into Triton's cache, which processes share; what went wrong."""
    kind, shape, num_rows, gated, tuning, dtype = wanted
    try:
        with torch.device("meta"):
            weight = pack(random_weight(kind, *shape, dtype or torch.bfloat16))
        if isinstance(tuning, Float8Tuning) or (kind == "float8" and tuning is None and num_rows >= MIN_ROWS):
            compile_float8(wanted, weight)
            return None
        tuning = tuning or code_tuning(weight, num_rows, large=has_large_shared(torch.device("cuda", 0)))
        kernel, constexprs, num_warps = code_variant(weight, num_rows, gated=gated, tuning=tuning)
        options = overlap_options(torch.device("cuda", 0)) | FUSED | {"num_warps": num_warps}
        bias, dtype, is_sum = dtype, dtype or torch.bfloat16, kernel is code_sum_kernel
        out = dtype if constexprs.get("SPLITS", 1) == 1 else torch.float32
        scales, zeros = weight.group_operands(in_words=not (is_sum or constexprs["SCALED"]))
        operands = scales.dtype, None if zeros is None else zeros.dtype, bias, out, shape[0]
        rows = () if is_sum else (num_rows,)
        codes = torch.uint8 if rows else torch.int32
        kernel.warmup(dtype, codes, *operands, *rows, grid=(1, 1), **constexprs | {"ASM": True}, **options)
    except Exception as error:
        return f"{wanted}: {type(error).__name__}: {error}"[:300]
    return None


def compile_float8(wanted: Wanted, weight: PackedCodes) -> None:
    """Of products of 8-bit floats."""
    _, shape, num_rows, gated, tuning, bias = wanted
    assert tuning is None or isinstance(tuning, Float8Tuning)
    constexprs, num_warps = scaled_variant(weight, num_rows, gated=gated, tuning=tuning)
    out = torch.bfloat16 if constexprs["SPLITS"] == 1 else torch.float32
    operands = torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn, torch.float32, bias, out, shape[0], num_rows
    options = overlap_options(torch.device("cuda", 0)) | FUSED | {"num_warps": num_warps}
    float8_tile_kernel.warmup(*operands, grid=(1, 1), **constexprs, **options)


def timed(shapes: dict[str, tuple[int, int]], row_numbers: list[int]) -> Iterator[Wanted]:
    """Kernels that are timed."""
    for kind, (name, shape), num_rows in itertools.product(KINDS, shapes.items(), row_numbers):
        if num_rows <= MAX_TILE_ROWS and (kind, name) != ("int4", "lm_head"):
            yield Wanted(f"int4/{GROUP}" if kind == "int4" else kind, shape, num_rows, name == "gate_up")


def checked(shapes: dict[str, tuple[int, int]]) -> Iterator[Wanted]:
    """Kernels that are checked."""
    for work in checks(shapes):
        for (kind, shape), num_rows, gated in itertools.product(work.cases(), work.row_numbers, (False, True)):
            if num_rows <= MAX_TILE_ROWS:
                yield Wanted(kind, shape, num_rows, gated, None, work.dtype)


def compile_all(pool: Pool, kernels: Iterable[Wanted]) -> None:
    """Several at a time; those that fail are named, and do so again when they are launched."""
    start, wanted = time.monotonic(), list(kernels)
    failed = [error for error in pool.map(compile_kernel, wanted, chunksize=1) if error]
    print_line(compiled=len(wanted), seconds=time.monotonic() - start, failed=failed[:4])
