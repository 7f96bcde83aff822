"""Attention that overlaps: with the kernel before, which writes its queries, and softmax with its own products."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import torch

from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.paged_prefill import triton as prefill_kernels
from qkv_engine.kernels.rms_norm import rms_norm
from qkv_engine.kernels.rope_kv_write import rope_kv_write
from studies.kernels.inputs import dense_page, make_case, uniform_page

from ..kernels import triton_decode_cases, triton_prefill_cases

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
LONG = 8192, 4096  # rows and columns of a norm that takes tens of microseconds


def decode_overlapped(seed: int) -> tuple[float, float]:
    """How many results differ from those of queries that were there: none; they are written behind a long kernel."""
    rng = random.Random(seed)
    kv_heads, group, head_dim = rng.choice((1, 2, 8)), rng.randint(1, 8), rng.choice((64, 128))
    pages = [dense_page(BF16, kv_heads, head_dim), uniform_page(rng.choice((8, 4, 4, 4, 2)), kv_heads, head_dim)]
    lengths = [rng.randint(200, 1500) for _ in range(rng.randint(1, 8))]
    case = make_case(pages, lengths, group=group, sink_tokens=32, demote_all=True, seed=seed, device=DEVICE)
    work, layer = triton_decode_cases.plan(case, rng.choice((1, 2, 4))), LayerFormats.of(case.pages, case.q.device)
    work = replace(work, bounds=work.bounds._replace(is_short=True, is_deep=rng.random() < 0.7))
    want, out = (torch.empty_like(case.q) for _ in range(2))
    paged_decode(case.q, case.arena, work, layer, 0.1, want)
    with torch.device(DEVICE):
        rows, weight = torch.randn(LONG).to(BF16), torch.ones(LONG[1], dtype=BF16)
        cos, sin = torch.full((len(lengths), 1, head_dim), -1.0), torch.zeros(len(lengths), 1, head_dim)
        qkv = torch.cat((-case.q, torch.zeros(len(lengths), 2 * kv_heads, head_dim, dtype=BF16)), 1)
        nowhere, room = torch.full((len(lengths), 2), -1), torch.zeros(1, head_dim, dtype=BF16)
    rms_norm(rows, weight, 1e-6)
    q = rope_kv_write(qkv, cos, sin, nowhere, room, 0, kv_heads)
    paged_decode(q, case.arena, work, layer, 0.1, out)
    return float((out != want).sum()), 0.0


def prefill_overlapped(seed: int) -> tuple[float, float]:
    """How many results of large tiles differ from those of the kernel for all devices: none, on Hopper, too."""
    rng = random.Random(seed)
    dtype, kv_heads, group, head_dim = rng.choice((BF16, FP16)), rng.choice((1, 2, 4)), rng.randint(1, 16), 256
    bits = rng.choice(((), (), (8,), (4, 2)))
    pages = [dense_page(dtype, kv_heads, head_dim), *(uniform_page(each, kv_heads, head_dim) for each in bits)]
    chunks = [
        (rng.choice((0, rng.randint(1, 1500))), rng.choice((1, 2, 64, 128, rng.randint(1, 700))))
        for _ in range(rng.randint(1, 5))
    ]
    sink, nulls = rng.choice((0, 16, 32, 128)), rng.random() < 0.3
    case, q, counts = triton_prefill_cases.build(pages, chunks, group, sink, dtype, seed, DEVICE)
    logits = torch.randn(q.shape[1], device=DEVICE) if nulls else None
    with patch.object(prefill_kernels, "STAGED_NBYTES", rng.choice((1, 1 << 20, 256 << 20))):
        found, want = (
            triton_prefill_cases.attend(case, q, counts, tuning=tuning, null_logits=logits)
            for tuning in (None, prefill_kernels.LARGE_TUNING)
        )
    return float((found != want).sum()), 0.0
