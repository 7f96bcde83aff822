"""Launch parameters of products with quantized weights that ``studies.kernels.linear_codes`` tries."""

from __future__ import annotations

from collections.abc import Sequence

from qkv_engine.kernels.linear.float8 import Float8Tuning
from qkv_engine.kernels.linear.integer import CodeSums, CodeTuning, Tuning

AnyTuning = Tuning | Float8Tuning

# Kinds of weights and numbers of rows, in the order in which they are tried.
TUNED = (
    *(("int4", 256), ("int4", 16), ("int4", 128), ("int4", 64), ("int4", 32), ("float8 tiles", 128), ("int4", 1)),
    *(("int8", 16), ("int8", 64), ("int8", 32), ("int4", 8), ("float8 tiles", 32), ("float8 tiles", 256)),
    *(("int8", 256), ("int8", 8), ("int8", 1), ("float8", 1), ("float8 tiles", 64), ("float8 tiles", 16)),
    *(("int8", 128), ("int4", 4)),
)


def candidates(kind: str, num_rows: int) -> Sequence[AnyTuning]:
    """Launch parameters to try, the likeliest first."""
    if kind == "float8 tiles":
        return float8_candidates(num_rows)
    is_int4 = kind == "int4"
    if num_rows == 1:
        return [CodeSums(vectors, loads) for vectors in (32, 64, 128) for loads in (4, 8, 16, 32)]
    if num_rows <= 16:
        block_m = 8 if num_rows <= 8 else 16
        sliced = [(16, 4, 2, 4), (16, 4, 4, 3), (32, 4, 1, 4), (32, 4, 2, 4), (32, 8, 1, 4)]
        shared = [
            (128, 8, 2, 3),
            (128, 8, 1, 4),
            (128, 8, 1, 6),
            (128, 4, 2, 3),
            (64, 4, 2, 3),
            (64, 4, 1, 6),
            (64, 4, 4, 3),
            (64, 2, 2, 3),
            (64, 2, 2, 4),
            (64, 2, 1, 6),
            (32, 2, 2, 4),
            (32, 2, 2, 5),
            (32, 2, 4, 3),
            (32, 1, 2, 4),
        ]
        return [
            CodeTuning(block_m, n, slices, spans if is_int4 else max(1, spans // 2), slices, stages)
            for n, slices, spans, stages in sliced
        ] + [
            CodeTuning(block_m, n, 1, spans if is_int4 else max(1, spans // 2), warps, stages, splits=splits)
            for splits in (1, 2, 4, 8)
            for n, warps, spans, stages in shared
        ]
    if num_rows <= 64:
        block_m = 32 if num_rows <= 32 else 64
        warps = [
            (64, 4, 1, 4),
            (64, 4, 2, 2),
            (64, 4, 2, 3),
            (128, 8, 1, 4),
            (128, 8, 2, 3),
            (128, 8, 1, 3),
            (128, 4, 1, 3),
        ]
        return [
            CodeTuning(block_m, n, 1, s, w, stages, scaled=scaled, splits=splits)
            for splits in (1, 2, 4, 8)
            for n, w, s, stages in warps
            for scaled in (False, True)[: 1 + is_int4]
        ]
    shapes = [(128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2)]
    shapes += [(256, 64, 8, 2), (64, 64, 4, 3), (64, 128, 8, 3), (64, 128, 4, 2), (256, 128, 8, 2)]
    return [
        CodeTuning(m, n, 1, 1, w, stages, scaled=is_int4, splits=splits)
        for m, n, w, stages in shapes
        for splits in (1, 2, 4)
    ]


def float8_candidates(num_rows: int) -> Sequence[AnyTuning]:
    """The same of products of 8-bit floats."""
    block_m = min(128, max(16, 1 << (num_rows - 1).bit_length()))
    shapes = [(128, 4, 4, 128), (128, 8, 4, 128), (64, 4, 4, 128), (64, 4, 3, 256), (128, 8, 3, 256), (128, 4, 3, 128)]
    found = [Float8Tuning(block_m, n, w, stages, splits, k) for n, w, stages, k in shapes for splits in (1, 2, 4)]
    if num_rows > 128:
        found += [Float8Tuning(256, 128, 8, stages, splits) for stages in (3, 4) for splits in (1, 2, 4)]
        found += [Float8Tuning(64, 128, 4, 4, splits) for splits in (1, 2)]
    return found
