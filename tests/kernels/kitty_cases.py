"""Child of ``test_kitty``: Kitty sides under Triton's interpreter against the references and float attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from qkv_engine.kernels.formats import PageShape, Side, make_format
from qkv_engine.kernels.formats.uniform import Uniform
from studies.kernels.inputs import dense_page, make_case, named_page

from .format_cases import demote_case, seal_case, tile_case
from .interpreted import report
from .triton_decode_cases import attend, error, plan

SHARES = ("0", "1", "12.5", "25", "100")
RANKINGS = ("kitty-25-variance", "kitty-25-random")
BF16 = torch.bfloat16


def kitty_sides(head_dim: int, heads: int = 2) -> list[Side]:
    """K sides at several shares of boosted channels and by every ranking."""
    names = [*(f"kitty-{share}" for share in SHARES), *RANKINGS]
    return [make_format(name, BF16).layout(PageShape(heads, 128, head_dim), "k") for name in names]


def wide_side(bits: int, head_dim: int, heads: int = 2) -> Side:
    return Uniform(bits, "channel", 128).layout(PageShape(heads, 128, head_dim), "k")


def attention(name: str, head_dim: int, group: int, v_name: str = "int2-token-128") -> Callable[[], float]:
    """Error of decode over a sink, sealed blocks and an open block; queries are float32, so nothing else rounds."""

    def run() -> float:
        pages = [dense_page(torch.float32, 2, head_dim), named_page(name, v_name, 2, head_dim)]
        case = make_case(pages, [300], group=group, sink_tokens=20, dtype=torch.float32, demote_all=True)
        assert (case.rungs == 1).sum() == 2
        return error(case, attend(case, plan(case)))

    return run


def cases() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for head_dim in (6, 80, 128):
        sides = kitty_sides(head_dim)
        found[f"seal D{head_dim}"] = partial(seal_case, sides, BF16)
        found[f"tile D{head_dim}"] = partial(tile_case, sides)
        steps = [(wide_side(bits, head_dim), side) for bits in (8, 4) for side in sides]
        found[f"demote D{head_dim}"] = partial(demote_case, steps)
    found["seal fp32 D64"] = partial(seal_case, kitty_sides(64), torch.float32)
    found["seal D256"] = partial(seal_case, kitty_sides(256, heads=1)[3:4], BF16)
    for share in SHARES:
        found[f"decode {share} % D64"] = attention(f"kitty-{share}", 64, 4)
    for head_dim in (80, 256):
        found[f"decode D{head_dim}"] = attention("kitty-25", head_dim, 4)
    for group in (1, 3, 8):
        found[f"decode G{group}"] = attention("kitty-12.5", 128, group)
    for v_name in ("int4-token-128", "int8-token-64", "int3-token-32", "int2-channel-128", "dense32"):
        found[f"decode V {v_name}"] = attention("kitty-25-variance", 64, 2, v_name)
    return found


if __name__ == "__main__":
    report(cases())
