"""Kernels compiled for Hopper without a GPU: registers, spills, layout changes, instructions.

python -m studies.kernels.compiled [--only SUBSTRING] [--mix]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from qkv_engine.kernels.delta_net import STATE_FORMATS, StateSpec
from qkv_engine.kernels.delta_net import triton as delta_net
from qkv_engine.kernels.delta_net.chunk_kernels import (
    chunk_scan_kernel,
    chunk_solve_kernel,
    conv_chunk_kernel,
    conv_state_kernel,
)
from qkv_engine.kernels.delta_net.format_kernels import narrow_state_kernel
from qkv_engine.kernels.delta_net.step_kernels import conv_step_kernel, delta_step_kernel, gated_norm_kernel
from qkv_engine.kernels.fusion import FUSED, UNFUSED
from qkv_engine.kernels.linear import integer
from qkv_engine.kernels.linear.bulk import HALF, TileRange, bulk_codes_kernel, bulk_variant
from qkv_engine.kernels.linear.code_tile import code_tile_kernel
from qkv_engine.kernels.linear.codes import Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.float8_rows import swiglu_rows_kernel, swiglu_rows_variant
from qkv_engine.kernels.linear.packed import PackedCodes, pack
from qkv_engine.kernels.linear.triton import ANY, SPLIT_TILES, TILES, few_rows_variant, linear_tile_kernel, split_tile
from qkv_engine.kernels.moe import SoftmaxOver, SwiGLU
from qkv_engine.kernels.moe import triton as moe
from qkv_engine.kernels.moe.code_kernel import expert_codes_kernel
from qkv_engine.kernels.moe.route_kernel import route_kernel, sort_kernel
from qkv_engine.kernels.moe.sum_kernel import down_sum_kernel, gate_up_sum_kernel
from qkv_engine.kernels.moe.tile_kernel import combine_kernel, expert_tile_kernel
from qkv_engine.kernels.paged_decode.triton import Tuning
from qkv_engine.kernels.paged_prefill import hopper
from qkv_engine.kernels.rms_norm.triton import rms_norm_kernel, rms_norm_variant
from qkv_engine.kernels.rope_kv_write.basis_triton import rope_basis_kv_write_kernel, rope_basis_kv_write_variant
from qkv_engine.kernels.rope_kv_write.triton import rope_kv_write_kernel, rope_kv_write_variant
from qkv_engine.kernels.sample.reference import TILE
from qkv_engine.kernels.sample.triton import sample_variants
from qkv_engine.kernels.seal.triton import seal_kernel, seal_variant
from qkv_engine.kernels.sigmoid_gate import triton as sigmoid_gate
from qkv_engine.kernels.sigmoid_gate.triton import sigmoid_gate_kernel
from qkv_engine.kernels.swiglu.triton import swiglu_kernel, swiglu_variant

from .compiled_attention import attention_kernels
from .in_flight import overwritten
from .inputs import PATTERN_SHAPES, dense_page, named_page, pattern_page
from .moe_codes import coded_experts_kernels

POINTERS = {"q_ptr": "*bf16", "arena_ptr": "*u8", "addresses_ptr": "*i64", "out_ptr": "*bf16", "o_ptr": "*fp32"}
POINTERS |= {"lse_ptr": "*fp32", "scale_log2": "fp32", "staged_ptr": "*fp16", "staged_addresses_ptr": "*i64"}
POINTERS |= {"offsets_ptr": "*i64", "banks_ptr": "*i64"}
BF16 = ("x", "residual", "weight", "gate_up", "qkv", "pages", "logits", "source")
POINTERS |= {f"{name}_ptr": "*bf16" for name in (*BF16, "inner", "pairs", "gate", "q_basis", "k_basis", "bias")}
POINTERS |= {"codes_ptr": "*u8", "scales_ptr": "*bf16", "zeros_ptr": "*u8"}
POINTERS |= {"cos_ptr": "*fp32", "signed_sin_ptr": "*fp32", "rows_ptr": "*i64"}
FP32 = ("peaks", "raw_peaks", "tile_peaks", "floors", "penalties", "biases", "edited", "weights", "frequencies", "sin")
POINTERS |= {f"{name}_ptr": "*fp32" for name in FP32}
POINTERS |= {"memory_ptr": "*u8"} | {
    f"{name}_ptr": "*i64" for name in ("src", "dst", "steps", "finite", "bank_steps", "windows")
}
POINTERS |= {f"{name}_ptr": "*bf16" for name in ("z", "norm", "b", "a", "solved", "scores")}  # of a gated delta-net
POINTERS |= {"decay_ptr": "*fp32", "dt_bias_ptr": "*fp32", "kept_ptr": "*fp32"}
POINTERS |= {"sums_ptr": "*i64", "positions_ptr": "*i64", "sampled_ptr": "*i64"}  # the rest are int32 or pointers to it
UNFUSED_KERNELS = [seal_kernel, *(kernel for kernel, *_ in sample_variants(TILE))]


def compile_kernel(kernel: Any, constexprs: dict[str, Any], tuning: Tuning, capability: int = 90) -> Any:
    """Compiles for sm_90 or another device as the engine does; pointers, strides, offsets and V are multiples of 16."""
    constexprs = {each.name: each.default for each in kernel.params if each.has_default} | constexprs
    names = [n for n in kernel.arg_names if n not in constexprs]
    types = {n: POINTERS.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names}
    if kernel.is_gluon():
        shape = f"{constexprs['TILE']}, {constexprs['D']}"
        types["rows"] = f"tensordesc<bf16[{shape}],{hopper.tile_layout(torch.bfloat16)!r}>"
    elif "rows" in types:
        tile = constexprs["TILE"], constexprs["BLOCK_D"]
        types["rows"] = f"tensordesc<{constexprs['SIDE'].STORED}[{tile[0]}, {tile[1]}]>"
    if kernel is bulk_codes_kernel:
        sides, stored = 1 + constexprs["GATED"], "u8" if constexprs["KIND"] == "int4" else "i8"
        types["x"] = f"tensordesc<bf16[{constexprs['BLOCK_M']}, {HALF}]>"
        types["codes"] = f"tensordesc<{stored}[{constexprs['BLOCK_N'] // sides}, {sides}, {HALF}]>"
    if kernel in (code_tile_kernel, expert_codes_kernel):
        in_words = kernel is expert_codes_kernel or not constexprs["SCALED"]
        has_words = constexprs["KIND"] == "float4" or (in_words and constexprs["GROUPS"] > 1)
        types["scales_ptr"] = "*fp32" if constexprs["KIND"] == "float8" else "*i32" if has_words else "*bf16"
    if kernel in (linear_tile_kernel, rms_norm_kernel) and constexprs["SPLITS"] > 1:
        types["out_ptr" if kernel is linear_tile_kernel else "x_ptr"] = "*fp32"
    aligned = [n for n in names if n.endswith(("_ptr", "_offset", "_bank")) or n.startswith("stride") or n == "V"]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in kernel.arg_names},
        attrs={(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        constexprs={(kernel.arg_names.index(n),): v for n, v in constexprs.items()},
    )
    fusion = UNFUSED if kernel in UNFUSED_KERNELS else FUSED
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages, **fusion}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def describe(built: Any) -> dict[str, Any]:
    """Registers, spilled bytes, shared memory, matrix instructions and layout changes of a compiled kernel.

    ``overwritten``: instructions that may write what a product under way reads.
    """
    ir = built.asm["ttgir"]
    found: dict[str, Any] = {"shared": built.metadata.shared, "layout changes": ir.count("ttg.convert_layout")}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True)
    text = done.stdout + done.stderr
    usage = dict(re.findall(r"(REG|STACK):(\d+)", text))
    ops = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_]+)", text, re.M))
    found |= {"registers": int(usage["REG"]), "spilled": int(usage["STACK"]), "instructions": sum(ops.values())}
    found |= {name: ops[name] for name in ("HMMA", "IMMA", "HGMMA", "IGMMA", "LDGSTS", "LDG", "LDL")}
    return found | {"overwritten": overwritten(text), "mix": dict(ops.most_common(24))}


def fused_kernels() -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """The small kernels beside attention, for the shapes of Llama 3.1 8B and Qwen3 8B."""
    variants = {
        "rms_norm 4096": (rms_norm_kernel, rms_norm_variant(4096, 1e-5, add=False)),
        "add_rms_norm 4096 float8": (rms_norm_kernel, rms_norm_variant(4096, 1e-5, add=True)),
        "add_rms_norm 4096": (rms_norm_kernel, rms_norm_variant(4096, 1e-5, add=True)),
        "add_rms_norm 5120": (rms_norm_kernel, rms_norm_variant(5120, 1e-5, add=True)),
        "add_rms_norm 2560 sums bias": (rms_norm_kernel, rms_norm_variant(2560, 1e-5, add=True, splits=4)),
        "add_rms_norm 4096 sums": (rms_norm_kernel, rms_norm_variant(4096, 1e-5, add=True, splits=2)),
        "swiglu 14336": (swiglu_kernel, swiglu_variant(14336)),
        "sigmoid_gate": (sigmoid_gate_kernel, ({"INNER": 4096, "TILE": sigmoid_gate.TILE}, sigmoid_gate.NUM_WARPS)),
        "float8 swiglu 12288": (swiglu_rows_kernel, swiglu_rows_variant(12288)),
        "rope_kv_write 32/8 D128": (rope_kv_write_kernel, rope_kv_write_variant(32, 8, 128, 1e-6, norm=False)),
        "rope_kv_write 32/8 D128 norm": (rope_kv_write_kernel, rope_kv_write_variant(32, 8, 128, 1e-6, norm=True)),
        "rope_kv_write 32/8 D80": (rope_kv_write_kernel, rope_kv_write_variant(32, 8, 80, 1e-6, norm=False)),
    }
    for name, (kernel, (constexprs, num_warps)) in variants.items():
        options = {"scales_ptr": "float8", "bias_ptr": "bias"} if kernel is rms_norm_kernel else {}
        plain = {pointer: None for pointer, option in options.items() if option not in name}
        yield name, kernel, {**constexprs, **plain, "OVERLAP": True}, Tuning(num_warps, 1)


def basis_kernels(*head_dims: int, overlap: bool = True) -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Rotation and KV write in a basis of keys, behind a norm."""
    for d in head_dims:
        constexprs, num_warps = rope_basis_kv_write_variant(32, 8, d, 1e-6, norm=True, itemsize=2)
        yield (
            f"rope_basis_kv_write 32/8 D{d}",
            rope_basis_kv_write_kernel,
            {**constexprs, "OVERLAP": overlap},
            Tuning(num_warps, 2),
        )


def linear_kernels(*, large: bool = True) -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Products of 16-bit weights in every tile: SwiGLU's of weights with many rows, plain ones of others.

    ``large``: see ``has_large_shared``; with it those in splits, too, for the shapes of Qwen3.5 4B and Qwen3 8B.
    """
    shapes = [(1, 24576, 4096), (1, 4096, 12288)]
    for num_rows, tiles in TILES.items():
        shapes += [(num_rows, 24576, 4096) if most == ANY else (num_rows, int(most), 12288) for most in tiles]
    for num_rows, num_out, size in shapes:
        gated = num_out == 24576
        kernel, constexprs, num_warps = few_rows_variant(num_rows, num_out, size, gated=gated)
        constexprs |= {"OVERLAP": True, "bias_ptr": None}
        name = kernel.__name__.replace("_kernel", f" {num_rows} x {size} x {num_out}") + gated * " gated"
        yield name, kernel, constexprs, Tuning(num_warps, constexprs.get("STAGES", 1))
    split = [(2560, 4096), (2560, 9216), (4096, 4096), (4096, 12288)] if large else []
    for num_rows, (num_out, size) in product(SPLIT_TILES, split):
        tile = split_tile(num_rows, num_out, size)
        kernel, constexprs, num_warps = few_rows_variant(num_rows, num_out, size, tuning=tile)
        name = f"linear_tile {num_rows} x {size} x {num_out} in {constexprs['SPLITS']}"
        yield name, kernel, constexprs | {"OVERLAP": True, "bias_ptr": None}, Tuning(num_warps, constexprs["STAGES"])


def code_kernels(*, large: bool = True) -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Products with quantized weights, for the shapes of Qwen3 8B; ``large``: see ``has_large_shared``."""
    with torch.device("meta"):
        scales = torch.empty(4096, 32, dtype=torch.bfloat16)
        int4 = pack(IntegerWeight(torch.empty(4096, 2048, dtype=torch.uint8), scales))
        int8 = pack(IntegerWeight(torch.empty(4096, 4096, dtype=torch.int8), scales[:, :1]))
        float8 = pack(Float8Weight(torch.empty(4096, 4096, dtype=torch.float8_e4m3fn), torch.empty(4096, 1)))
    found: list[tuple[str, PackedCodes, int, bool, integer.Tuning]] = []
    for weight, gated in product((int4, int8, float8), (False, True)):
        bits = 4 if weight is int4 else 8
        for num_rows in integer.TUNINGS[bits]:
            tuning = integer.code_tuning(weight, num_rows, large=large)
            found.append((f"{weight.kind} {num_rows} rows" + gated * " gated", weight, num_rows, gated, tuning))
        others = [(num_rows, "many", tuning) for num_rows, tuning in integer.WIDE_TUNINGS[bits].items()]
        if large:  # 4,096 rows of a weight are so few that they have their own
            others += [(num_rows, "more", integer.TUNINGS[bits][num_rows]) for num_rows in integer.NARROW_TUNINGS[bits]]
        for num_rows, name, tuning in others:
            title = f"{weight.kind} {num_rows} rows, {name} of the weight" + gated * " gated"
            found.append((title, weight, num_rows, gated, tuning))
    for name, weight, num_rows, gated, tuning in found:
        kernel, constexprs, num_warps = integer.code_variant(weight, num_rows, gated=gated, tuning=tuning)
        constexprs |= {"OVERLAP": True, "ASM": True, "bias_ptr": None, "zeros_ptr": None}
        yield name, kernel, constexprs, Tuning(num_warps, constexprs.get("STAGES", 1))
    if large:
        yield from bulk_kernels(int4, int8)


def bulk_kernels(*weights: PackedCodes) -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """The same by bulk copies, whole and in splits."""
    for weight, gated, splits in product(weights, (False, True), (1, 2)):
        for num_rows, tuning in integer.BULK_TUNINGS[4 if weight.kind == "int4" else 8].items():
            constexprs = bulk_variant(weight, tuning, TileRange(splits - 1, 1, splits), gated=gated)
            constexprs |= {"OVERLAP": True, "ASM": True, "bias_ptr": None, "zeros_ptr": None}
            name = f"{weight.kind} {num_rows} rows bulk" + gated * " gated" + (splits > 1) * " splits"
            yield name, bulk_codes_kernel, constexprs, Tuning(tuning.num_warps, tuning.num_stages)


def moe_kernels(*, overlap: bool = True) -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Mixture of experts, for the shape of Qwen3 30B-A3B."""
    size, inner, num, top_k = 2048, 768, 128, 8
    found: list[tuple[str, Any, tuple[dict[str, Any], int]]] = [
        ("route", route_kernel, moe.route_variant(num, top_k, SoftmaxOver.ALL)),
        ("sort", sort_kernel, moe.sort_variant(8192, num, 16)),
        ("combine", combine_kernel, moe.combine_variant(size, top_k)),
    ]
    for most, tuning in moe.TUNINGS.items():
        if isinstance(tuning, moe.ExpertSums):
            gate_up = moe.gate_up_sum_variant(size, inner, top_k, SwiGLU(), tuning.gate_up)
            found.append((f"gate_up_sum {most}", gate_up_sum_kernel, gate_up))
            down = moe.down_sum_variant(size, inner, top_k, tuning.down)
            found.append((f"down_sum {most}", down_sum_kernel, down))
        else:
            gate_up = moe.tile_variant(2 * inner, size, top_k, SwiGLU(), tuning.block_m, tuning.gate_up)
            found.append((f"gate_up tile {most}", expert_tile_kernel, gate_up))
            down = moe.tile_variant(size, inner, top_k, None, tuning.block_m, tuning.down)
            found.append((f"down tile {most}", expert_tile_kernel, down))
    for name, kernel, (constexprs, num_warps) in found:
        constexprs = {**constexprs, "OVERLAP": overlap}
        if "bias_ptr" in kernel.arg_names:
            constexprs["bias_ptr"] = None
        yield f"moe {name}", kernel, constexprs, Tuning(num_warps, constexprs.get("STAGES", 1))


def delta_net_kernels(*, overlap: bool = True, large: bool = True) -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Gated delta-net, for the shapes of Qwen3.5 4B and 27B; what reads states, in all formats of them.

    ``large``: for devices with large shared memory.
    """
    bf16, overlaps = torch.bfloat16, {"OVERLAP": overlap}
    for k_heads, v_heads in ((16, 32), (16, 48)):
        spec, shape = StateSpec(k_heads, v_heads, 128, 128, 4), f"{k_heads}/{v_heads}"
        found: list[tuple[str, Any, tuple[dict[str, Any], int], dict[str, Any]]] = [
            (shape, conv_step_kernel, delta_net.conv_step_variant(spec), overlaps),
            (shape, gated_norm_kernel, delta_net.gated_norm_variant(v_heads, 128, 1e-6), overlaps),
            (shape, conv_chunk_kernel, delta_net.conv_chunk_variant(spec), {}),
            (shape, conv_state_kernel, delta_net.conv_state_variant(spec), {}),
            (shape, chunk_solve_kernel, delta_net.chunk_solve_variant(spec, bf16), {}),
        ]
        mixed = spec._replace(narrower=(STATE_FORMATS["int16"],))
        found.append((f"{shape} mixed", conv_step_kernel, delta_net.conv_step_variant(mixed), overlaps))
        for stored in (*(spec._replace(format=fmt) for fmt in STATE_FORMATS.values()), mixed):
            name = f"{shape} {stored.format.name}{' mixed' * bool(stored.narrower)}"
            for is_whole in sorted({delta_net.has_whole_heads(stored, number) for number in (1, 64)}):
                variant = delta_net.delta_step_variant(stored, 1e-6, is_whole=is_whole)
                norm = {} if is_whole else {"z_ptr": None, "norm_ptr": None}
                found.append((f"{name}{' whole' * is_whole}", delta_step_kernel, variant, overlaps | norm))
            found.append((name, chunk_scan_kernel, delta_net.chunk_scan_variant(stored, bf16, large=large), {}))
        for old, new in combinations(STATE_FORMATS.values(), 2):
            variant = delta_net.narrow_variant(spec._replace(format=old), new, bf16)
            found.append((f"{shape} {old.name} {new.name}", narrow_state_kernel, variant, {}))
        for name, kernel, (constexprs, num_warps), more in found:
            kind = kernel.__name__.removesuffix("_kernel")
            yield f"delta_net {kind} {name}", kernel, {**constexprs, **more}, Tuning(num_warps, 1)


def seal_kernels() -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Seals of pages with patterns."""
    for number, heads, _, d in PATTERN_SHAPES:
        dense = dense_page(torch.bfloat16, heads, d)
        for bits, tokens in product((4, 2, 1), (128, 32)):
            page = pattern_page(bits, number, heads, d, tokens)
            for old, new in ((dense.k, page.k), (dense.v, page.v)):
                constexprs, num_warps = seal_variant(old, new)
                name = f"seal {new.name} int{bits}/{tokens} patterns{number} D{d}"
                yield name, seal_kernel, constexprs, Tuning(num_warps, 3)
    dense = dense_page(torch.bfloat16, 8, 128)
    page = named_page("int2-channel-128-patterns32-later32", "int2-token-128-patterns32-later32", 8, 128)
    for old, new in ((dense.k, page.k), (dense.v, page.v)):
        constexprs, num_warps = seal_variant(old, new)
        yield f"seal {new.name} int2/128 patterns32-later32 D128", seal_kernel, constexprs, Tuning(num_warps, 3)


def sample_kernels() -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Sampling, for the vocabulary of Qwen3."""
    for kernel, constexprs, num_warps in sample_variants(151_936):
        yield kernel.__name__.removesuffix("_kernel"), kernel, constexprs, Tuning(num_warps, 3)


def compiled_kernels() -> Iterator[tuple[str, Any, dict[str, Any], Tuning]]:
    """Name, kernel, compile-time arguments and launch parameters of every variant."""
    yield from attention_kernels()
    yield from seal_kernels()
    yield from fused_kernels()
    yield from basis_kernels(64, 80, 96, 128, 256)
    yield from linear_kernels()
    yield from code_kernels()
    yield from moe_kernels()
    yield from coded_experts_kernels()
    yield from delta_net_kernels()
    yield from sample_kernels()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--mix", action="store_true")
    args = parser.parse_args()
    columns: list[str] = []
    for name, kernel, constexprs, tuning in compiled_kernels():
        if args.only not in name:
            continue
        row = describe(compile_kernel(kernel, constexprs, tuning))
        mix = row.pop("mix")
        if not columns:
            columns = list(row)
            print(f"{'kernel':36} {'warps':>6} {'stages':>6} " + " ".join(f"{c:>12}" for c in columns))
        print(f"{name:36} {tuning.num_warps:6} {tuning.num_stages:6} " + " ".join(f"{row[c]:12}" for c in columns))
        if args.mix:
            print("   ", mix, flush=True)


if __name__ == "__main__":
    main()
