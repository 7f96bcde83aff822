"""Decode cases for Triton's interpreter: relative errors, or 0.0 where results must agree to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qkv_engine.kernels.formats import BlockLayout, PageLayout, PageShape, Place
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.split import Bounds
from qkv_engine.kernels.paged_decode.triton import launches, paged_decode
from studies.kernels.inputs import Case, T, dense_page, make_case, reference, uniform_page

from ..toy_format.layout import Sign
from .interpreted import report

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [1, 31, 127, 128, 129, 300]


def plan(case: Case, item_blocks: int = 2, bounds: Bounds | None = None) -> DecodeWork:
    return DecodeWork.build(
        case.addresses,
        case.rungs,
        case.lengths,
        num_rungs=len(case.pages),
        item_blocks=item_blocks,
        sink_tokens=case.sink_tokens,
        block_tokens=T,
        bounds=bounds,
        banks=case.banks,
    )


def attend(case: Case, work: DecodeWork, q: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    q, layer = case.q if q is None else q, LayerFormats.of(case.pages, case.q.device)
    return paged_decode(q, case.arena, work, layer, case.q.shape[2] ** -0.5, out).float()


def error(case: Case, out: Tensor) -> float:
    want = reference(case, case.q.shape[2] ** -0.5)
    return float((out - want).norm() / want.norm())


def against_reference(
    pages: Sequence[PageLayout],
    lengths: Sequence[int],
    group: int,
    sink: int = 0,
    dtype: torch.dtype = BF16,
    lookahead: int = 0,
) -> Callable[[], float]:
    def run() -> float:
        case = make_case(pages, lengths, group=group, sink_tokens=sink, dtype=dtype, lookahead=lookahead)
        return error(case, attend(case, plan(case)))

    return run


def mixed() -> Case:
    pages = [dense_page(BF16, 1, 64), uniform_page(8, 1, 64), uniform_page(4, 1, 64), uniform_page(2, 1, 64)]
    return make_case(pages, [700, 450, 129], group=4, sink_tokens=20)


def neighbours() -> float:
    """Difference that other requests make to a request's result: none."""
    case = mixed()
    together = attend(case, plan(case))
    only = slice(1, 2)
    alone = replace(
        case, q=case.q[only], addresses=case.addresses[only], rungs=case.rungs[only], lengths=case.lengths[only]
    )
    return float((attend(alone, plan(alone)) - together[1:2]).abs().max())


def idle_programs() -> float:
    """Difference made by spare programs, a format without blocks and an empty request, which gives zeros: none."""
    case = mixed()
    want = attend(case, plan(case))
    padded = replace(
        case,
        addresses=torch.cat((case.addresses, case.addresses[:1])),
        rungs=torch.cat((case.rungs, torch.full_like(case.rungs[:1], ABSENT))),
        lengths=torch.cat((case.lengths, torch.zeros_like(case.lengths[:1]))),
        pages=[*case.pages, uniform_page(1, 1, 64)],
    )
    bounds = plan(case).bounds
    work = plan(padded, bounds=Bounds(bounds.first + 3, bounds.others + 50))
    work.items[work.item_first[-1] :] = torch.tensor([0, 0, 1, 0, 0])  # would spoil the first part of the first request
    out = attend(padded, work, torch.cat((case.q, case.q[:1])))
    return float((out[:-1] - want).abs().max() + out[-1].abs().max())


def rungs_of_one_format(page: PageLayout) -> Callable[[], float]:
    """Error of rungs of one format in one launch, wherever their pages lie in a slot."""

    def run() -> float:
        pages = [dense_page(BF16, 1, 64), uniform_page(4, 1, 64)]
        for k, v in ((0, 16384), (256, 10240), (10240, 256)):
            places = {"k_place": Place(k, k + page.k.codes_nbytes), "v_place": Place(v, v + page.v.codes_nbytes)}
            pages.append(replace(page, **places))
        case = make_case(pages, [1500, 800], group=4, sink_tokens=20)
        layer, work = LayerFormats.of(case.pages, case.q.device), plan(case)
        found = launches(layer.ranges, work.bounds, case.num_kv_heads)
        assert sorted((formats.first, formats.end) for formats, _ in found) == [(0, 1), (1, 2), (2, 5)]
        return error(case, attend(case, work))

    return run


def launch_order() -> float:
    """Few programs first, then by falling size; narrow formats have no launch as long as all blocks are dense."""
    pages = [dense_page(BF16, 1, 64), *(uniform_page(bits, 1, 64) for bits in (8, 4, 4, 2))]
    ranges = LayerFormats.of(pages, torch.device("cpu")).ranges

    def order(first: int, others: int) -> list[tuple[int, int]]:
        return [(f.first, n) for f, n in launches(ranges, Bounds(first, others), 8)]

    assert order(1, 512) == [(0, 8), (1, 4096), (2, 4096), (4, 4096)]
    assert order(512, 16) == [(0, 4096), (1, 128), (2, 128), (4, 128)]
    assert order(512, 15) == [(1, 120), (2, 120), (4, 120), (0, 4096)]
    assert order(512, 0) == [(0, 4096)]
    return 0.0


def growing() -> float:
    """Error of a plan with longer lengths: one more token makes no new plan."""
    case = make_case([dense_page(BF16, 1, 64)], [40, 200], group=3, sink_tokens=20)
    work = plan(case)
    work.lengths.copy_(case.lengths - 1)
    shorter = replace(case, lengths=case.lengths - 1, k=[x[:-1] for x in case.k], v=[x[:-1] for x in case.v])
    before = error(shorter, attend(shorter, work))
    work.lengths.add_(1)
    return max(before, error(case, attend(case, work)))


def strided_queries() -> float:
    """Error for queries that are a view of a wider tensor."""
    case = make_case([dense_page(BF16, 2, 64)], [40, 200], group=3)
    wide = torch.cat((case.q, torch.full_like(case.q, float("nan"))), 1)
    return float((attend(case, plan(case), wide[:, : case.q.shape[1]]) - attend(case, plan(case))).abs().max())


def constant_pages() -> float:
    """Error for groups whose range is zero."""
    case = mixed()
    case.arena.zero_()
    return float(attend(case, plan(case)).abs().max())


def sign_page(num_kv_heads: int, head_dim: int) -> PageLayout:
    """A page of a family that lives in the tests."""
    shape = PageShape(num_kv_heads, T, head_dim)
    return BlockLayout.stack([Sign().layout(shape, "k"), Sign().layout(shape, "v")]).pages[0]


def cases() -> dict[str, Callable[[], float]]:
    d64, d80 = dense_page(BF16, 2, 64), dense_page(BF16, 1, 80)
    found = {
        "bf16 group 3": against_reference([d64], LENGTHS, 3, lookahead=1),
        "bf16 group 7 D 80 sink": against_reference([d80], LENGTHS, 7, sink=20),
        "bf16 group 16 sink of a tile": against_reference([d64], [33, 300], 16, sink=32),
        "bf16 sink not full, block not begun": against_reference([d64], [1, 31, 300], 3, sink=20, lookahead=1),
        "fp16 group 1": against_reference([dense_page(FP16, 3, 64)], [129, 300], 1, dtype=FP16),
        "fp32": against_reference([dense_page(FP32, 1, 80)], [129, 300], 4, sink=20, dtype=FP32),
        "exact neighbours": neighbours,
        "exact idle programs": idle_programs,
        "exact strided queries": strided_queries,
        "exact constant pages": constant_pages,
        "exact launch order": launch_order,
        "growing": growing,
    }
    for bits in (8, 4, 2):
        for page, dense, group in ((uniform_page(bits, 2, 64), d64, 4), (uniform_page(bits, 1, 80), d80, 7)):
            found[f"int{bits} group {group}"] = against_reference([dense, page], [300, 450, 64], group, sink=20)
    for bits in (3, 1):
        for small in (32, 64):
            page = uniform_page(bits, 1, 80, group=small)
            found[f"int{bits}/{small}"] = against_reference([d80, page], [450], 3, sink=20)
    found["int4/32"] = against_reference([d80, uniform_page(4, 1, 80, group=32)], [450], 3)
    found["int8 K per token"] = against_reference([d80, uniform_page(8, 1, 80, k_axis="token")], [450], 1)
    found["int8 on three rungs"] = rungs_of_one_format(uniform_page(8, 1, 64))
    found["int3/32 on three rungs"] = rungs_of_one_format(uniform_page(3, 1, 64, group=32))
    sign, four = sign_page(1, 80), uniform_page(4, 1, 80)
    for name, page in {"sign": sign, "K sign V 4 bits": BlockLayout.stack([sign.k, four.v]).pages[0]}.items():
        found[f"{name}, a family of the tests"] = against_reference([d80, page], [450], 4, sink=20)
    found["K 4 V 2 bits"] = against_reference([d80, uniform_page((4, 2), 1, 80)], [450], 1)
    return found


if __name__ == "__main__":
    report(cases())
