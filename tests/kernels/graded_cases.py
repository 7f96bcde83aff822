"""Child of ``test_graded``: graded sides under Triton's interpreter against the references and float attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from qkv_engine.kernels.formats import PageShape, Side, make_format
from qkv_engine.kernels.formats.graded import GradedSide
from studies.kernels.inputs import dense_page, make_case, named_page

from .format_cases import demote_case, seal_case, tile_case
from .interpreted import report
from .triton_decode_cases import attend, error, plan

BF16 = torch.bfloat16
SPECTRAL = "graded-16x4-48x2"
ALL_WIDTHS = "graded-16x8-16x4-16x2-16x1"


def layouts(head_dim: int) -> tuple[str, ...]:
    """Runs of every width, alone and together; heads with codes throughout, and with nearly none."""
    rest = head_dim - 16
    return (
        SPECTRAL,
        ALL_WIDTHS,
        "graded-32x8",
        "graded-48x1",
        "graded-16x2",
        f"graded-{head_dim // 16 * 16}x4",
        f"graded-16x8-{rest // 16 * 16}x1",
    )


def graded_sides(head_dim: int, heads: int = 2) -> list[Side]:
    shape = PageShape(heads, 128, head_dim)
    return [make_format(name, BF16).layout(shape, side) for name in layouts(head_dim) for side in ("k", "v")]


def steps(sides: list[Side]) -> list[tuple[Side, Side]]:
    """Every way down to the sides."""
    graded = [side for side in sides if isinstance(side, GradedSide)]
    return [(side.uniform(bits), side) for side in graded for bits in (8, 4) if bits >= side.runs[0].bits]


def attention(k: str, v: str, head_dim: int, group: int, heads: int = 2) -> Callable[[], float]:
    """Error of decode over a sink, sealed blocks and an open block; queries are float32, so nothing else rounds."""

    def run() -> float:
        pages = [dense_page(torch.float32, heads, head_dim), named_page(k, v, heads, head_dim)]
        case = make_case(pages, [300], group=group, sink_tokens=20, dtype=torch.float32, demote_all=True)
        assert (case.rungs == 1).sum() == 2
        return error(case, attend(case, plan(case)))

    return run


def cases() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for head_dim in (64, 80, 128, 256):
        sides = graded_sides(head_dim, heads=1 if head_dim == 256 else 2)
        found[f"seal D{head_dim}"] = partial(seal_case, sides, BF16)
        found[f"tile D{head_dim}"] = partial(tile_case, sides)
        found[f"demote D{head_dim}"] = partial(demote_case, steps(sides))
    found["seal fp32 D80"] = partial(seal_case, graded_sides(80), torch.float32)
    for head_dim in (64, 80, 128, 256):
        names = layouts(head_dim)
        pairs = list(zip(names, names[1:] + names[:1], strict=True))
        for k, v in pairs if head_dim in (80, 128) else pairs[:2]:
            found[f"decode K {k} V {v} D{head_dim}"] = attention(k, v, head_dim, 2, heads=1)
    for group in (1, 3, 8):
        found[f"decode G{group}"] = attention(SPECTRAL, SPECTRAL, 128, group)
    for bits in (8, 4, 3, 2, 1):
        for head_dim in (6, 80, 128):
            name = f"int{bits}-channel-128"
            found[f"decode K {name} V {name} D{head_dim}"] = attention(name, name, head_dim, 2, heads=1)
    found["decode V eta"] = attention("int4-channel-128", "int2-channel-128-eta0.045", 64, 2)
    for other in ("int4-token-128", "int8-token-64", "int8-channel-128", "int2-channel-32", "dense32"):
        found[f"decode V {other}"] = attention(SPECTRAL, other, 64, 2)
    for other in ("int4-channel-128", "int8-channel-128", "int2-token-128", "kitty-25", "dense32"):
        found[f"decode K {other}"] = attention(other, ALL_WIDTHS, 64, 2)
    return found


if __name__ == "__main__":
    report(cases())
