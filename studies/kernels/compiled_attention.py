"""Every variant of the kernels of attention, to be compiled: ``compiled.py``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.paged_decode.triton import NO_BANKS, Tuning, decode_variant
from qkv_engine.kernels.paged_prefill import hopper
from qkv_engine.kernels.paged_prefill.kernel import prefill_kernel
from qkv_engine.kernels.paged_prefill.stage import stage_kernel
from qkv_engine.kernels.paged_prefill.triton import prefill_variant, stage_constexprs

from .inputs import PATTERN_SHAPES, dense_page, named_page, pattern_page, uniform_page

NO_RULE = {"positions_ptr": None, "null_logits_ptr": None}  # of prefill: no window, no null logits
Variant = tuple[str, Any, dict[str, Any], Tuning]  # name, kernel, compile-time arguments, launch parameters


def variants() -> dict[str, tuple[PageLayout, int]]:
    """Page format and query heads a KV head by name."""
    bf16, fp16 = torch.bfloat16, torch.float16
    found = {f"dense bf16 D{d} G4": (dense_page(bf16, 8, d), 4) for d in (64, 80, 96, 128, 256)}
    found["dense fp16 D128 G4"] = (dense_page(fp16, 8, 128), 4)
    found["dense fp32 D128 G4"] = (dense_page(torch.float32, 8, 128), 4)
    found["dense bf16 D128 G16"] = (dense_page(bf16, 8, 128), 16)
    for bits in (8, 4, 2):
        for d, g in ((128, 4), (128, 1), (128, 8), (64, 4), (80, 4), (256, 4)):
            found[f"int{bits} D{d} G{g}"] = (uniform_page(bits, 8, d), g)
    for bits in (4, 3, 2, 1):
        found[f"float int{bits}/32 D128 G4"] = (uniform_page(bits, 8, 128, group=32), 4)
    for name in ("kitty-12.5", "kitty-25"):
        found |= {f"{name} D128 G{g}": (named_page(name, "int2-token-128", 8, 128), g) for g in (4, 1, 8)}
    for name in ("graded-16x4-48x2", "int4-channel-128", "int8-channel-128"):
        found |= {f"{name} both D128 G{g}": (named_page(name, name, 8, 128), g) for g in (4, 8)}
    found |= {f"int2 patterns{m} D128 G8": (pattern_page(2, m, 8, 128), 8) for m in (32, 64)}
    for number, heads, group, d in PATTERN_SHAPES:
        for bits, tokens in product((4, 2, 1), (128, 32)):
            page = pattern_page(bits, number, heads, d, tokens)
            found[f"int{bits}/{tokens} patterns{number} D{d} G{group}"] = page, group
    found["float int8 per token D128 G4"] = (uniform_page(8, 8, 128, k_axis="token"), 4)
    return found


def ruled_kernels() -> Iterator[Variant]:
    """Attention with a window, and with a soft cap."""
    pages = variants()
    formats = ("dense bf16 D64", "dense bf16 D128", "dense bf16 D256", "int8 D128", "int4 D128", "int2 D128")
    rules: list[dict[str, Any]] = [{"window": 4096}, {"softcap": 50.0}]
    for name, rule in product((f"{name} G4" for name in formats), rules):
        page, group = pages[name]
        kernel, constexprs, tuning = decode_variant(page, group, sink_tokens=32, **rule)
        suffix = " ".join(rule)
        yield f"{name} {suffix}", kernel, {**constexprs, **NO_BANKS, "OVERLAP": True}, tuning
        if page.k.dense_dtype is not None:
            constexprs, tuning = prefill_variant(page, group, 32, **rule)
            for is_staged in (False, True):
                place = {"IS_STAGED": is_staged, "IS_LAST": True, **NO_RULE}
                if "window" in rule:
                    del place["positions_ptr"]
                staged = " staged" if is_staged else ""
                yield f"prefill{staged} {name} {suffix}", prefill_kernel, {**constexprs, **place}, tuning


def hopper_kernels() -> Iterator[Variant]:
    """The first of several launches of prefill for Hopper, and the last of staged pages, without null logits."""
    options = hopper.hopper_options(dense_page(torch.bfloat16, 8, hopper.HEAD_DIM), 4, 32)
    warps = options.pop("num_warps")
    for is_staged in (False, True):
        place = {"IS_STAGED": is_staged, "IS_LAST": is_staged, "null_logits_ptr": None}
        name = f"prefill for Hopper{' staged' if is_staged else ''}"
        yield name, hopper.kernel(), {**options, **place}, Tuning(warps, 2)


def attention_kernels() -> Iterator[Variant]:
    """Decode and prefill over pages of every format, with and without a window or a soft cap."""
    for name, (page, group) in variants().items():
        kernel, constexprs, tuning = decode_variant(page, group, sink_tokens=32)
        no_banks = {} if page.has_bank else NO_BANKS
        yield name, kernel, {**constexprs, **no_banks, "OVERLAP": True}, tuning
        if group == 4 and page.k.dense_dtype is not None:
            constexprs, tuning = prefill_variant(page, group, 32)
            place = {"IS_STAGED": False, "IS_LAST": True, **NO_RULE}
            yield f"prefill {name}", prefill_kernel, {**constexprs, **place}, tuning
        elif group == 4:
            yield f"stage {name}", stage_kernel, {**stage_constexprs(page), **no_banks}, Tuning(4, 1)
    yield from ruled_kernels()
    yield from hopper_kernels()
