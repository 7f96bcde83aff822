"""Windows, soft caps and null logits under Triton's interpreter: relative errors against float attention.

Every byte of a block that no query sees is ``POISON``, and its table entry names another rung.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork, block_positions
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.paged_prefill import triton as prefill_kernels
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, tile_tokens
from studies.kernels.inputs import (
    POISON,
    Case,
    T,
    dense_page,
    make_case,
    named_page,
    pattern_page,
    prefill_reference,
    reference,
    uniform_page,
)

from .interpreted import report
from .triton_prefill_cases import build, rows_of

BF16, FP32 = torch.bfloat16, torch.float32
SCALE = 0.17  # of no head dim


def behind(case: Case, window: int, firsts: Tensor) -> Case:
    """The case without the blocks that queries from positions ``firsts`` on do not see."""
    width = case.addresses.shape[1]
    ends = block_positions(torch.arange(1, width + 1), case.sink_tokens, T).to(firsts.device)
    unseen = (ends <= firsts[:, None] + 1 - window) & (case.rungs != ABSENT)
    most = max(page.span[1] for page in case.pages)
    for address in case.addresses[unseen].tolist():
        case.arena[address : address + most] = POISON
    others = (case.rungs + 1) % len(case.pages)
    return replace(case, rungs=torch.where(unseen, others, case.rungs))


def decode_work(case: Case, window: int | None, item_blocks: int = 2) -> DecodeWork:
    return DecodeWork.build(
        case.addresses,
        case.rungs,
        case.lengths,
        num_rungs=len(case.pages),
        item_blocks=item_blocks,
        sink_tokens=case.sink_tokens,
        block_tokens=T,
        banks=case.banks,
        window=window,
    )


def decode_error(case: Case, window: int | None, softcap: float | None = None, nulls: Tensor | None = None) -> float:
    want = reference(case, SCALE, window=window, softcap=softcap, null_logits=nulls)
    if window is not None:
        case = behind(case, window, case.lengths - 1)
    layer, work = LayerFormats.of(case.pages, case.q.device), decode_work(case, window)
    out = paged_decode(case.q, case.arena, work, layer, SCALE, softcap=softcap, null_logits=nulls).float()
    return float((out - want).norm() / want.norm())


def decode(
    pages: Sequence[PageLayout],
    windows: Sequence[int | None],
    lengths: Sequence[int],
    group: int = 2,
    sink: int = 0,
    has_nulls: bool = False,
    **rule: Any,
) -> Callable[[], float]:
    """The largest error over ``windows``; rung 0 has 32 bits, so that nothing but codes rounds."""

    def run() -> float:
        errors = []
        for window in windows:
            case = make_case(pages, lengths, group=group, sink_tokens=sink, dtype=FP32, lookahead=0)
            nulls = torch.randn(case.q.shape[1]) * 2 if has_nulls else None
            errors.append(decode_error(case, window, nulls=nulls, **rule))
        return max(errors)

    return run


def prefill_error(
    case: Case,
    q: Tensor,
    counts: Sequence[int],
    window: int | None,
    softcap: float | None = None,
    nulls: Tensor | None = None,
) -> float:
    want = prefill_reference(case, q, counts, SCALE, window=window, softcap=softcap, null_logits=nulls)
    tokens = torch.tensor(list(counts), device=q.device)
    if window is not None:
        case = behind(case, window, case.lengths - tokens)
    work = PrefillWork.build(
        case.addresses.cpu(),
        case.rungs.cpu(),
        (case.lengths - tokens).cpu(),
        tokens.cpu(),
        num_rungs=len(case.pages),
        tile_tokens=tile_tokens(q.shape[1], case.num_kv_heads, rows_of(case, q)),
        sink_tokens=case.sink_tokens,
        block_tokens=T,
        banks=None if case.banks is None else case.banks.cpu(),
        window=window,
    )
    work = work.to(q.device)
    out = paged_prefill(q, case.arena, work, case.pages, SCALE, softcap=softcap, null_logits=nulls).float()
    return float((out - want).norm() / want.norm())


def prefill(
    pages: Sequence[PageLayout],
    windows: Sequence[int | None],
    chunks: Sequence[tuple[int, int]],
    group: int = 2,
    sink: int = 0,
    has_nulls: bool = False,
    staged_nbytes: int = 1 << 28,
    **rule: Any,
) -> Callable[[], float]:
    """The largest error over ``windows`` of chunks (start, tokens)."""

    def run() -> float:
        errors, usual = [], prefill_kernels.STAGED_NBYTES
        prefill_kernels.STAGED_NBYTES = staged_nbytes
        for window in windows:
            case, q, counts = build(pages, chunks, group, sink, FP32)
            nulls = torch.randn(q.shape[1]) * 2 if has_nulls else None
            errors.append(prefill_error(case, q, counts, window, nulls=nulls, **rule))
        prefill_kernels.STAGED_NBYTES = usual
        return max(errors)

    return run


def plain_window() -> float:
    """Difference between a window that reaches beyond the context and none: none."""
    pages = [dense_page(FP32, 1, 64), uniform_page(4, 1, 64)]
    case = make_case(pages, [1, 300, 450], group=4, sink_tokens=20, dtype=FP32)
    layer = LayerFormats.of(case.pages, case.q.device)
    outs = [paged_decode(case.q, case.arena, decode_work(case, w), layer, SCALE) for w in (None, 450)]
    return float((outs[0] - outs[1]).abs().max())


def cases() -> dict[str, Callable[[], float]]:
    dense = {d: dense_page(FP32, 1, d) for d in (64, 96, 128, 256, 512)}
    lengths, around = [1, 31, 128, 149, 300, 700], (1, 100, 129, 281, 299, 5000)
    found = {
        "exact beyond the context": plain_window,
        "dense": decode([dense[64]], around, lengths),
        "dense, sink": decode([dense[64]], around, lengths, sink=20),
        "dense, sink of a tile": decode([dense[96]], (120, 280, 300), lengths, group=7, sink=32),
        "dense 256": decode([dense[256]], (60, 250), [300], group=1),
        "dense 512": decode([dense[512]], (None, 60), [300], group=4, sink=20),
        "dense, soft cap": decode([dense[128]], (None, 130), [300, 7], softcap=2.0),
        "dense, null logits": decode([dense[64]], (None, 130), [300, 7], has_nulls=True, group=3),
    }
    narrow = {
        "int8": (uniform_page(8, 1, 64), 64),
        "int4": (uniform_page(4, 1, 128), 128),
        "kivi-2": (uniform_page(2, 1, 64, group=32), 64),
        "int8 512": (uniform_page(8, 1, 512), 512),
        "int3": (uniform_page(3, 1, 96), 96),
        "K4 V2": (uniform_page((4, 2), 1, 64), 64),
        "int4 K per token": (uniform_page(4, 1, 64, k_axis="token"), 64),
        "kitty": (named_page("kitty-25", "int2-token-128", 1, 64), 64),
        "pattern": (pattern_page(2, 20, 1, 64), 64),
        "float int4/32 per token": (uniform_page(4, 1, 64, k_axis="token", group=32), 64),
    }
    for name, (page, d) in narrow.items():
        pages = [dense[d], page]
        found[f"{name} decode"] = decode(pages, (5, 281, 384), [450, 300], sink=20)
        rule = {"softcap": 30.0, "has_nulls": True}
        found[f"{name} decode, soft cap and null logits"] = decode(pages, (None, 150), [450], group=3, **rule)
        found[f"{name} prefill"] = prefill(pages, (200,), [(440, 33)], sink=20, **rule)
    several = [dense[64], uniform_page(8, 1, 64), uniform_page(4, 1, 64), uniform_page(2, 1, 64)]
    found["int, several rungs"] = decode(several, (384, 900), [1200, 640], group=4, sink=20)
    chunks = [(0, 1), (0, 130), (149, 40), (470, 140)]
    found |= {
        "prefill dense": prefill([dense[64]], (1, 64, 129, 300), chunks, sink=0),
        "prefill dense, sink": prefill([dense[64]], (5, 140, 450), chunks, sink=20),
        "prefill dense 96 group 7": prefill([dense[96]], (100,), [(300, 40)], group=7, sink=32),
        "prefill dense 256": prefill([dense[256]], (100,), [(150, 40)], group=1),
        "prefill dense 512": prefill([dense[512]], (None, 100), [(150, 20)], group=4, sink=20),
        "prefill dense, soft cap": prefill([dense[128]], (None, 130), [(200, 40)], softcap=2.0),
        "prefill dense, null logits": prefill([dense[64]], (None, 130), [(200, 40)], group=3, has_nulls=True),
        "prefill int, several rungs": prefill(several, (140, 384), [(1100, 140), (600, 33)], sink=20),
        "prefill int, in pieces": prefill(several, (384,), [(1100, 70), (600, 33)], sink=20, staged_nbytes=1),
    }
    return found


if __name__ == "__main__":
    report(cases())
