"""Child of ``test_pattern``: pattern sides under Triton's interpreter against the references and float attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from qkv_engine.kernels.formats import PageShape, Side, make_format
from qkv_engine.kernels.formats.pattern import NO_PATTERN, PatternSide
from qkv_engine.kernels.formats.pattern.reference import read_index
from qkv_engine.kernels.formats.rows import page_rows
from studies.kernels.inputs import Case, dense_page, make_case, named_page, prefill_reference

from .format_cases import seal_case, tile_case
from .interpreted import report
from .triton_decode_cases import attend, error, plan
from .triton_prefill_cases import attend as attend_prefill
from .triton_prefill_cases import build

BF16 = torch.bfloat16


def pattern_sides(head_dim: int, numbers: tuple[int | str, ...], heads: int = 2, group: int = 128) -> list[Side]:
    """K and V with each number of patterns, of 4 bits and less."""
    shape, found = PageShape(heads, 128, head_dim), []
    for i, number in enumerate(numbers):
        bits = (2, 1, 4)[i % 3]
        found.append(make_format(f"int{bits}-channel-{group}-patterns{number}", BF16).layout(shape, "k"))
        found.append(make_format(f"int{bits}-token-{group}-patterns{number}", BF16).layout(shape, "v"))
    return found


def shares(case: Case) -> float:
    """The least share of a side's tokens that have a pattern."""
    page, addresses = case.pages[1], case.addresses[case.rungs == 1]
    sides = zip((page.k, page.v), page_rows(case.arena, addresses, page), strict=True)
    taken = [read_index(rows, side) != NO_PATTERN for side, rows in sides if isinstance(side, PatternSide)]
    return min(float(t.float().mean()) for t in taken)


def prefill(number: int, head_dim: int) -> float:
    """Error of prefill of two requests' chunks over sealed blocks with patterns, which are staged."""
    k, v = f"int2-channel-128-patterns{number}", f"int2-token-128-patterns{number}"
    pages = [dense_page(torch.float32, 2, head_dim), named_page(k, v, 2, head_dim)]
    case, q, counts = build(pages, [(300, 7), (0, 30), (280, 40)], 2, 20, torch.float32)
    assert shares(case) > 0.5
    out = attend_prefill(case, q, counts)
    want = prefill_reference(case, q, counts, head_dim**-0.5)
    return float((out - want).norm() / want.norm())


def attention(k: str, v: str, head_dim: int, group: int = 4, heads: int = 2) -> Callable[[], float]:
    """Error of decode over a sink, sealed blocks and an open block; queries are float32, so nothing else rounds."""

    def run() -> float:
        pages = [dense_page(torch.float32, heads, head_dim), named_page(k, v, heads, head_dim)]
        case = make_case(pages, [300, 290], group=group, sink_tokens=20, dtype=torch.float32, demote_all=True)
        assert (case.rungs == 1).sum() == 4 and (shares(case) > 0.5 or "patterns1" in (k[-9:], v[-9:]))
        return error(case, attend(case, plan(case)))

    return run


def cases() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for head_dim, numbers in ((6, (3, 33)), (80, (32, 1, 255)), (64, (64, 3))):
        found[f"seal D{head_dim}"] = partial(seal_case, pattern_sides(head_dim, numbers), BF16)
        found[f"tile D{head_dim}"] = partial(tile_case, pattern_sides(head_dim, numbers))
    found["seal fp32 D64 groups of 32"] = partial(seal_case, pattern_sides(64, (5,), group=32), torch.float32)
    found["seal later D64"] = partial(
        seal_case, pattern_sides(64, ("8-later24", "3-later60", "33-later2")), torch.float32
    )
    found["tile later D64"] = partial(tile_case, pattern_sides(64, ("8-later24",)))
    found["seal fp16 D64"] = partial(seal_case, pattern_sides(64, (7,)), torch.float16)
    for number in (1, 33, 255):
        k, v = f"int2-channel-128-patterns{number}", f"int2-token-128-patterns{number}"
        found[f"decode {number} patterns D64"] = attention(k, v, 64)
    for head_dim in (24, 128):
        found[f"decode D{head_dim}"] = attention("int2-channel-128-patterns32", "int2-token-128-patterns32", head_dim)
    for group in (3, 8):
        found[f"decode G{group}"] = attention("int2-channel-128-patterns33", "int2-token-128-patterns33", 64, group)
    for bits in (8, 4, 3, 1):
        k, v = f"int{bits}-channel-64-patterns20", f"int{bits}-token-32-patterns20"
        found[f"decode {bits} bits in groups"] = attention(k, v, 64)
    for number, head_dim in ((33, 64), (3, 80)):
        found[f"prefill {number} patterns D{head_dim}"] = partial(prefill, number, head_dim)
    found["decode K alone"] = attention("int4-channel-128-patterns32", "int2-token-128", 64)
    found["decode V alone"] = attention("int2-channel-128", "int4-token-128-patterns32", 64)
    found["decode beside dense V"] = attention("int2-channel-128-patterns9", "dense32", 64)
    found["decode beside dense K"] = attention("dense32", "int2-token-128-patterns9", 80, heads=1)
    return found


if __name__ == "__main__":
    report(cases())
