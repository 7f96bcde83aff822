"""Gated delta-net in Triton, over states that lie in a byte arena. Shapes of launches depend on the layer's alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED, UNFUSED
from ..nvidia import has_large_shared
from ..overlap import overlap_options
from .chunk_kernels import chunk_scan_kernel, chunk_solve_kernel, conv_chunk_kernel, conv_state_kernel
from .cpu import CHUNK
from .format_kernels import narrow_state_kernel
from .formats import FLOAT32, INT8, INT16, StateFormat
from .plan import ChunkWork, StepWork
from .state import DeltaWeights, StateSpec
from .step_kernels import conv_step_kernel, delta_step_kernel, gated_norm_kernel

CONV_TILE = 256  # channels of a program
CONV_CHANNELS, CONV_ROWS = 512, 4  # of chunks: 8 channels of 4 rows a thread under way
STEP_COLUMNS = 32  # of a head's values
# Value heads of a step's requests from which on each program has a whole one, and norms it. Fewer programs would leave
# multiprocessors idle (a Hopper has 132): up to 3 requests of 32 heads have cut ones, and the norm as a launch.
WHOLE_HEADS = 128
WHOLE_ELEMENTS = 128 * 128  # most of a head's state that the registers of 4 warps hold
SOLVE_REGISTERS = 128  # a thread: four programs then fit a multiprocessor of Hopper, which is worth some spills
# By the bytes of an element. In 16 bits not fewer: they are the rows of a product, of which Hopper's have at least 64.
# In 32 bits more do not fit registers.
SCAN_COLUMNS = {2: 64, 4: 32}
MAX_STAGED_KEYS = 128  # key channels of a head: three stages of wider ones do not fit shared memory
ELEMENT = {FLOAT32: tl.float32, INT16: tl.int16, INT8: tl.int8}


def delta_net_step_triton(
    memory: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    work: StepWork,
    layer: int,
    out: Tensor,
) -> None:
    """One token of each request: the states in ``memory`` go on by it, each in its one of the spec's formats.

    ``out`` is normed under the gate ``z``.
    Shapes:  memory [bytes] uint8;  qkv [B, C];  z [B, HV, DV], heads contiguous;  b, a [B, HV], columns contiguous;
             out [B, HV, DV], contiguous
    Rows of padding come out as zeros.
    """
    _check(qkv, z, b, a, out)
    spec, is_whole = weights.spec, has_whole_heads(weights.spec, len(qkv))
    number, tables = len(qkv), (work.words[layer], work.lengths)
    mixed, overlap = _empty_like_rows(qkv), overlap_options(qkv.device)
    constexprs, num_warps = conv_step_variant(spec)
    conv_step_kernel[(number * triton.cdiv(spec.num_channels, constexprs["TILE"]),)](
        memory, qkv, weights.conv, *tables, mixed, qkv.stride(0), **constexprs, num_warps=num_warps, **overlap, **FUSED
    )
    constexprs, num_warps = delta_step_variant(spec, weights.eps, is_whole=is_whole)
    norm = (z, weights.norm) if is_whole else (None, None)
    delta_step_kernel[(number * spec.num_v_heads * triton.cdiv(spec.v_dim, constexprs["BLOCK_V"]),)](
        memory, mixed, b, a, weights.decay, weights.dt_bias, *tables, *norm, out, b.stride(0), z.stride(0),
        **constexprs, num_warps=num_warps, **overlap, **FUSED,
    )  # fmt: skip
    if not is_whole:
        gated_rms_norm_triton(out, z, weights.norm, weights.eps, out)


def delta_net_chunk_triton(
    memory: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    work: ChunkWork,
    layer: int,
    out: Tensor,
) -> None:
    """All tokens of each request: the states in ``memory`` go on by them, each in its one of the spec's formats.

    ``out`` is normed under the gate ``z``.
    Shapes:  memory [bytes] uint8;  qkv [N, C];  z [N, HV, DV], heads contiguous;  b, a [N, HV], columns contiguous;
             out [N, HV, DV], contiguous
    """
    _check(qkv, z, b, a, out)
    spec = weights.spec
    words, items, chunks = work.words[layer], work.items, work.chunks
    mixed, dims = qkv.new_empty(len(chunks), CHUNK, spec.num_channels), (spec.num_v_heads, CHUNK)
    solved = qkv.new_empty(len(chunks), *dims, CHUNK)
    scores = torch.empty_like(solved)
    kept = qkv.new_empty(len(chunks), *dims, dtype=torch.float32)
    constexprs, num_warps = conv_chunk_variant(spec)
    tile = constexprs["HEADS"] * constexprs["BLOCK_K"]
    parts = triton.cdiv(2 * spec.num_k_heads, constexprs["HEADS"]) + triton.cdiv(spec.num_v_heads * spec.v_dim, tile)
    conv_chunk_kernel[(parts, len(chunks))](
        memory, qkv, weights.conv, words, items, chunks, mixed, qkv.stride(0),
        **constexprs, num_warps=num_warps, **FUSED,
    )  # fmt: skip
    constexprs, num_warps = conv_state_variant(spec)
    conv_state_kernel[(len(items) * triton.cdiv(spec.num_channels, constexprs["TILE"]),)](
        memory, qkv, words, items, qkv.stride(0), **constexprs, num_warps=num_warps, **FUSED
    )
    constexprs, num_warps = chunk_solve_variant(spec, qkv.dtype)
    condensed = solved, scores, kept
    large = has_large_shared(qkv.device)
    registers = {"maxnreg": SOLVE_REGISTERS} if large and qkv.element_size() == 2 else {}
    chunk_solve_kernel[(len(chunks) * spec.num_v_heads,)](
        mixed, b, a, weights.decay, weights.dt_bias, chunks, *condensed, b.stride(0),
        **constexprs, num_warps=num_warps, num_stages=1, **registers, **FUSED,
    )  # fmt: skip
    constexprs, num_warps = chunk_scan_variant(spec, qkv.dtype, large=large)
    chunk_scan_kernel[(len(items) * spec.num_v_heads * triton.cdiv(spec.v_dim, constexprs["BLOCK_V"]),)](
        memory, mixed, words, items, *condensed, out, **constexprs, num_warps=num_warps, **FUSED
    )
    gated_rms_norm_triton(out, z, weights.norm, weights.eps, out)


def narrow_states_triton(
    memory: Tensor, src: Tensor, dst: Tensor, spec: StateSpec, new: StateFormat, dtype: torch.dtype, finite: Tensor
) -> None:
    """See ``step_down.narrow_states``."""
    constexprs, num_warps = narrow_variant(spec, new, dtype)
    parts = spec.num_v_heads * triton.cdiv(spec.v_dim, constexprs["BLOCK_V"])
    grid = len(src), max(parts, triton.cdiv(constexprs["CONV"], constexprs["TILE"]))
    narrow_state_kernel[grid](memory, src, dst, finite, **constexprs, num_warps=num_warps, **UNFUSED)


def gated_rms_norm_triton(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See ``gated_rms_norm``; ``out`` [N, H, D], contiguous, may be x."""
    num_tokens, heads, size = x.shape
    assert x.is_contiguous() and out.is_contiguous() and z.stride()[1:] == (size, 1) and x.dtype == z.dtype
    number = num_tokens * heads
    constexprs, num_warps = gated_norm_variant(heads, size, eps)
    gated_norm_kernel[(triton.cdiv(number, constexprs["ROWS"]),)](
        x, z, weight, out, z.stride(0), number,
        **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED,
    )  # fmt: skip


def conv_step_variant(spec: StateSpec) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``conv_step_kernel``."""
    return {**_conv(spec), "TILE": CONV_TILE}, 4


def conv_chunk_variant(spec: StateSpec) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``conv_chunk_kernel``."""
    conv = {**_heads(spec), "W": spec.conv_width, "CONVS": _conv(spec)["CONVS"], "CHUNK": CHUNK}
    block = triton.next_power_of_2(spec.k_dim)
    return {**conv, "HEADS": max(1, CONV_CHANNELS // block), "BLOCK_K": block, "ROWS": CONV_ROWS}, 2


def conv_state_variant(spec: StateSpec) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``conv_state_kernel``."""
    return {**_conv(spec), "TILE": CONV_TILE}, 4


def has_whole_heads(spec: StateSpec, number: int) -> bool:
    """Whether programs of ``delta_step_kernel`` have whole heads of ``number`` requests, and norm them.

    Where states have more than two formats they would spill.
    """
    blocks = _blocks(spec, triton.next_power_of_2(spec.v_dim))
    fits = blocks["BLOCK_K"] * blocks["BLOCK_V"] <= WHOLE_ELEMENTS and len(spec.narrower) <= 1
    return fits and number * spec.num_v_heads >= WHOLE_HEADS


def delta_step_variant(spec: StateSpec, eps: float, *, is_whole: bool) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``delta_step_kernel``; ``is_whole``: its programs have whole heads."""
    blocks = _blocks(spec, triton.next_power_of_2(spec.v_dim) if is_whole else STEP_COLUMNS)
    return {**_heads(spec), **blocks, "EPS": eps, "FORMATS": _formats(spec)}, 4 if is_whole else 2


def chunk_solve_variant(spec: StateSpec, dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``chunk_solve_kernel``."""
    block = {"BLOCK_K": _blocks(spec, 1)["BLOCK_K"]}
    return {**_heads(spec), **block, "CHUNK": CHUNK, "PRECISION": _precision(dtype)}, 4


def chunk_scan_variant(spec: StateSpec, dtype: torch.dtype, *, large: bool) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``chunk_scan_kernel``; ``large``: see ``has_large_shared``."""
    is_staged = large and dtype.itemsize == 2 and spec.k_dim <= MAX_STAGED_KEYS
    products = {"CHUNK": CHUNK, "PRECISION": _precision(dtype), "STAGES": 3 if is_staged else 1}
    columns = SCAN_COLUMNS[dtype.itemsize]
    blocks = _blocks(spec, columns)
    blocks["BLOCK_V"] = max(blocks["BLOCK_V"], columns)
    return {**_heads(spec), **blocks, **products, "FORMATS": _formats(spec)}, 4 if is_staged else 8


def narrow_variant(spec: StateSpec, new: StateFormat, dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``narrow_state_kernel``."""
    heads = {name: value for name, value in _heads(spec).items() if name != "HK"}
    parts = _side("OLD", spec) | _side("NEW", spec._replace(format=new))
    conv = spec.num_channels * (spec.conv_width - 1) * dtype.itemsize
    return {**heads, **_blocks(spec, STEP_COLUMNS), **parts, "CONV": conv, "TILE": 1024}, 4


def gated_norm_variant(heads: int, size: int, eps: float) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps of ``gated_norm_kernel``."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    return {"HV": heads, "DV": size, "EPS": eps, "ROWS": rows, "BLOCK_V": block}, min(8, max(1, rows * block // 512))


def _side(name: str, spec: StateSpec) -> dict[str, Any]:
    """The format of ``spec`` as one of the two of ``narrow_state_kernel``."""
    element, scales, shift = _format(spec)
    return {name: element, f"{name}_SCALES": scales, f"{name}_CONV": spec.conv_offset, f"{name}_SHIFT": shift}


def _conv(spec: StateSpec) -> dict[str, Any]:
    return {"C": spec.num_channels, "W": spec.conv_width, "CONVS": tuple(form.conv_offset for form in spec.forms)}


def _heads(spec: StateSpec) -> dict[str, int]:
    return {"HK": spec.num_k_heads, "HV": spec.num_v_heads, "DK": spec.k_dim, "DV": spec.v_dim}


def _formats(spec: StateSpec) -> tuple[tuple[Any, int, int], ...]:
    """How ``load_state`` and ``store_state`` find a state in each of its formats."""
    return tuple(_format(form) for form in spec.forms)


def _format(spec: StateSpec) -> tuple[Any, int, int]:
    """The type of elements, the bytes before the scales, 0 if there are none, and the shift of codes."""
    return ELEMENT[spec.format], spec.scales_offset if spec.format.has_scales else 0, spec.format.shift


def _blocks(spec: StateSpec, columns: int) -> dict[str, int]:
    """Blocks of products: at least 16 wide."""
    widths = triton.next_power_of_2(spec.k_dim), min(columns, triton.next_power_of_2(spec.v_dim))
    return dict(zip(("BLOCK_K", "BLOCK_V"), (max(16, width) for width in widths), strict=True))


def _precision(dtype: torch.dtype) -> str:
    """Of products: three of TF32's 11 bits give those of float32, one has more than inputs of 16 bits."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _empty_like_rows(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    assert z.stride()[1:] == (z.shape[2], 1) and z.shape == out.shape and z.dtype == qkv.dtype
    assert qkv.stride(1) == b.stride(1) == a.stride(1) == 1 and b.stride(0) == a.stride(0) and out.is_contiguous()
