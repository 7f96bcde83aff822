"""Kernels of models with groups of layers and of experts, compiled for three generations, which needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.moe import SwiGLU
from qkv_engine.kernels.moe import triton as moe
from qkv_engine.kernels.moe.sum_kernel import down_sum_kernel, gate_up_sum_kernel
from qkv_engine.kernels.moe.tile_kernel import expert_tile_kernel
from qkv_engine.kernels.nvidia import LARGE_SHARED_NBYTES
from qkv_engine.kernels.paged_decode.triton import NO_BANKS, Tuning, decode_variant
from qkv_engine.kernels.paged_prefill.kernel import prefill_kernel
from qkv_engine.kernels.paged_prefill.triton import (
    BLOCK_M,
    LARGE_BLOCK_M,
    WIDE_BLOCK_M,
    prefill_variant,
)
from studies.kernels.compiled import compile_kernel, describe
from studies.kernels.inputs import dense_page, uniform_page

SHARED_NBYTES = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}  # a program's at most, by compute capability
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, shift=1.0)
# KV heads, query heads a KV head and head dim of a model's layers, and what they compute; Gemma 4 has layers of both.
LAYERS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "gemma 2": (8, 2, 256, {"window": 4096, "softcap": 50.0}),
    "gemma 3": (4, 2, 256, {"window": 1024}),
    "gemma 4": (1, 8, 256, {"window": 512}),
    "gemma 4 full": (1, 8, 512, {}),
    "gemma 4 full, few heads": (1, 4, 512, {}),
    "gpt-oss": (8, 8, 64, {"window": 128}),
    "mistral": (8, 4, 128, {"window": 4096}),
}
Case = tuple[str, Any, dict[str, Any], Tuning]


def attention() -> Iterator[Case]:
    """Decode over dense and sealed pages, prefill with and without null logits."""
    for name, (heads, group, head_dim, rule) in LAYERS.items():
        dense = dense_page(torch.bfloat16, heads, head_dim)
        for kind, page in (("dense", dense), *((f"int{n}", uniform_page(n, heads, head_dim)) for n in (8, 4))):
            kernel, constexprs, tuning = decode_variant(page, group, sink_tokens=32, **rule)
            yield f"{name} decode {kind}", kernel, {**constexprs, **NO_BANKS, "OVERLAP": True}, tuning
        block_m = WIDE_BLOCK_M if head_dim > 256 else BLOCK_M
        yield prefill(name, dense, group, rule, block_m)


def prefill(name: str, dense: PageLayout, group: int, rule: dict[str, Any], block_m: int) -> Case:
    constexprs, tuning = prefill_variant(dense, group, 32, block_m=block_m, **rule)
    place: dict[str, Any] = {"IS_STAGED": False, "IS_LAST": True}
    if "window" not in rule:
        place["positions_ptr"] = None
    if name != "gpt-oss":
        place["null_logits_ptr"] = None
    return f"{name} prefill", prefill_kernel, {**constexprs, **place}, tuning


def experts() -> Iterator[Case]:
    """Those of gpt-oss 20B, with biases and an activation of its own."""
    size, inner, top_k = 2880, 2880, 4
    for most, tuning in moe.TUNINGS.items():
        products: list[tuple[str, Any, tuple[dict[str, Any], int]]]
        if isinstance(tuning, moe.ExpertSums):
            gate_up = moe.gate_up_sum_variant(size, inner, top_k, GPT_OSS, tuning.gate_up)
            down = moe.down_sum_variant(size, inner, top_k, tuning.down)
            products = [("gate_up", gate_up_sum_kernel, gate_up), ("down", down_sum_kernel, down)]
        else:
            gate_up = moe.tile_variant(2 * inner, size, top_k, GPT_OSS, tuning.block_m, tuning.gate_up)
            down = moe.tile_variant(size, inner, top_k, None, tuning.block_m, tuning.down)
            products = [("gate_up", expert_tile_kernel, gate_up), ("down", expert_tile_kernel, down)]
        for name, kernel, (constexprs, num_warps) in products:
            stages = constexprs.get("STAGES", 1)
            yield f"{name} {most}", kernel, {**constexprs, "OVERLAP": True}, Tuning(num_warps, stages)


CASES = [*attention(), *experts()]


@pytest.mark.parametrize(
    "rule",
    [{}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"window": 1024}, {"window": 4096, "softcap": 50.0}))],
)
def test_large_tiles_fit(rule: dict[str, Any]) -> None:
    """Those of 256 channels, which devices have for which they are chosen."""
    _, kernel, constexprs, tuning = prefill("large", dense_page(torch.bfloat16, 4, 256), 4, rule, LARGE_BLOCK_M)
    found = describe(compile_kernel(kernel, constexprs, tuning))
    assert found["shared"] <= LARGE_SHARED_NBYTES and found["spilled"] <= 64


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_NBYTES)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_kernels_fit(case: Case, capability: int, report: list[str]) -> None:
    name, kernel, constexprs, tuning = case
    if "OVERLAP" in constexprs:
        constexprs = {**constexprs, "OVERLAP": capability >= 90}
    found = describe(compile_kernel(kernel, constexprs, tuning, capability))
    sizes = f"{found['registers']} registers, {found['spilled']} bytes spilled, {found['shared']} shared"
    report.append(f"{name}, sm_{capability}: {sizes}")
    assert found["shared"] <= SHARED_NBYTES[capability]
