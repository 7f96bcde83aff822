"""Prefill cases for Triton's interpreter: relative errors, or 0.0 where results must agree to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.formats import BlockLayout, PageLayout
from qkv_engine.kernels.paged_prefill import triton
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, query_rows, tile_tokens
from studies.kernels.inputs import Case, T, dense_page, make_case, prefill_reference, uniform_page

from .interpreted import report
from .triton_decode_cases import sign_page

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def attend(
    case: Case, q: Tensor, counts: Sequence[int], out: Tensor | None = None, block_m: int | None = None, **options: Any
) -> Tensor:
    """Attention in tiles of ``block_m`` rows, by default those of the device."""
    tokens = torch.tensor(list(counts), device=q.device)
    work = PrefillWork.build(
        case.addresses,
        case.rungs,
        case.lengths - tokens,
        tokens,
        num_rungs=len(case.pages),
        tile_tokens=tile_tokens(q.shape[1], case.num_kv_heads, block_m or rows_of(case, q)),
        sink_tokens=case.sink_tokens,
        block_tokens=T,
        banks=case.banks,
    )
    return paged_prefill(q, case.arena, work, case.pages, q.shape[2] ** -0.5, out, **options).float()


def rows_of(case: Case, q: Tensor) -> int:
    """Rows of a query tile on the device of ``q``."""
    dtype = case.pages[0].k.dense_dtype
    assert dtype is not None
    return query_rows(q.shape[2], dtype, q.device)


def build(
    pages: Sequence[PageLayout],
    chunks: Sequence[tuple[int, int]],
    group: int,
    sink: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Case, Tensor, list[int]]:
    """Requests whose chunks are (start, tokens), with the chunks' queries."""
    counts = [n for _, n in chunks]
    lengths = [start + n for start, n in chunks]
    starts = [start for start, _ in chunks]
    case = make_case(
        pages, lengths, group=group, sink_tokens=sink, dtype=dtype, dense_from=starts, seed=seed, device=device
    )
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(sum(counts), case.q.shape[1], case.q.shape[2], generator=generator).to(device, dtype)
    return case, q, counts


def against_reference(
    pages: Sequence[PageLayout],
    chunks: Sequence[tuple[int, int]],
    group: int,
    sink: int = 0,
    dtype: torch.dtype = BF16,
    block_m: int | None = None,
) -> Callable[[], float]:
    def run() -> float:
        case, q, counts = build(pages, chunks, group, sink, dtype)
        want = prefill_reference(case, q, counts, q.shape[2] ** -0.5)
        return float((attend(case, q, counts, block_m=block_m) - want).norm() / want.norm())

    return run


def neighbours() -> float:
    """Difference that other chunks of the launch make to a chunk's result: none."""
    case, q, counts = build([dense_page(BF16, 1, 64), uniform_page(4, 1, 64)], [(300, 9), (200, 40)], 4, 20, BF16)
    alone = Case(
        case.q[1:],
        case.arena,
        case.addresses[1:],
        case.rungs[1:],
        case.lengths[1:],
        case.pages,
        case.k[1:],
        case.v[1:],
        case.num_kv_heads,
        case.sink_tokens,
    )
    return float((attend(alone, q[9:], counts[1:]) - attend(case, q, counts)[9:]).abs().max())


def in_pieces() -> float:
    """Error over a history of codes that is dequantized a block at a time."""
    run = against_reference([dense_page(BF16, 1, 80), uniform_page(4, 1, 80)], [(331, 100), (467, 33)], 4, sink=20)
    before, triton.STAGED_NBYTES = triton.STAGED_NBYTES, 1
    error = run()
    triton.STAGED_NBYTES = before
    return error


def cases() -> dict[str, Callable[[], float]]:
    d64, d80 = dense_page(BF16, 2, 64), dense_page(BF16, 1, 80)
    starts = [(0, n) for n in (1, 31, 127, 128, 129, 300)]
    mixed = BlockLayout.stack([d80.k, uniform_page(4, 1, 80).v]).pages[0]
    several = [d64, uniform_page(8, 2, 64), uniform_page(2, 2, 64), uniform_page(3, 2, 64, group=32)]
    return {
        "bf16 from the start group 3": against_reference([d64], starts, 3),
        "bf16 from the start sink": against_reference([d64], starts, 1, sink=20),
        "bf16 history group 7 D 80 sink": against_reference([d80], [(130, 1), (130, 170), (410, 40)], 7, sink=20),
        "fp16": against_reference([dense_page(FP16, 1, 64)], [(100, 60)], 4, dtype=FP16),
        "fp32": against_reference([dense_page(FP32, 1, 80)], [(100, 60)], 4, sink=20, dtype=FP32),
        "int4 history": against_reference([d80, uniform_page(4, 1, 80)], [(331, 100), (467, 33)], 4, sink=20),
        "int8, 2 and 3 history": against_reference(several, [(800, 100), (667, 33)], 4, sink=20),
        "int4 K per token": against_reference([d80, uniform_page(4, 1, 80, k_axis="token")], [(300, 10)], 4),
        "dense and mixed history": against_reference([d80, d80, mixed], [(700, 40), (467, 33)], 4, sink=20),
        "int4 history in pieces": in_pieces,
        "history of a family of the tests": against_reference([d80, sign_page(1, 80)], [(300, 10)], 4, sink=20),
        "bf16 large tiles D 144": against_reference(
            [dense_page(BF16, 1, 144)], [(0, 40), (210, 100)], 3, sink=20, block_m=triton.LARGE_BLOCK_M
        ),
        "int4 history, large tiles D 144": against_reference(
            [dense_page(BF16, 1, 144), uniform_page(4, 1, 144)], [(300, 30)], 4, block_m=triton.LARGE_BLOCK_M
        ),
        "exact neighbours": neighbours,
    }


if __name__ == "__main__":
    report(cases())
