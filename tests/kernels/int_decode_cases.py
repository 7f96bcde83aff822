"""Integer decode cases for Triton's interpreter: relative errors against float64 attention over dequantized pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import triton
from torch import Tensor

from qkv_engine.kernels.formats.family import PageShape
from qkv_engine.kernels.formats.uniform.integer import KeyFunctions, ValueFunctions, integer_functions
from qkv_engine.kernels.formats.uniform.layout import BITS, Axis, Uniform, UniformSide
from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.paged_decode.int_kernel import decode_int_kernel
from qkv_engine.kernels.paged_decode.triton import NO_BANKS, NO_WINDOW

from .interpreted import report
from .uniform_bytes import encode

T = 128
LOG2_E = 1.4426950408889634
Items = list[tuple[int, int, int, int, int]]  # (request, first block, blocks, part, rung)


@dataclass(frozen=True)
class Pages:
    """Requests whose blocks have K and V of one format, on several rungs that put them at different offsets."""

    k: UniformSide
    v: UniformSide
    q: Tensor
    arena: Tensor
    offsets: Tensor
    addresses: Tensor
    items: Items
    item_first: list[int]
    values: list[tuple[Tensor, Tensor]]  # of each block, in the order of addresses

    @property
    def num_parts(self) -> int:
        return len(self.items)


def sides(
    k_bits: int,
    v_bits: int,
    head_dim: int,
    k_axis: Axis,
    k_group: int,
    v_group: int,
    heads: int = 2,
    eta: Fraction = Fraction(0),
) -> tuple[UniformSide, UniformSide]:
    shape = PageShape(heads, T, head_dim)
    k, v = Uniform(k_bits, k_axis, k_group, eta), Uniform(v_bits, "token", v_group, eta)
    return k.layout(shape, "k"), v.layout(shape, "v")


def make_pages(k: UniformSide, v: UniformSide, group: int, blocks: Sequence[Sequence[int]], split: int = 2) -> Pages:
    """``blocks[r][b]``: blocks of request b on rung r, cut into items of ``split``; unwritten bytes are 0xFF."""
    generator = torch.Generator().manual_seed(0)
    heads, head_dim = k.shape.num_kv_heads, k.shape.head_dim
    offsets, slot = _place(k, v, len(blocks))
    total = sum(map(sum, blocks))
    arena = torch.full(((total + 1) * slot,), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(total, generator=generator)
    items: Items = []
    item_first, addresses, values = [0], [], []
    for rung, counts in enumerate(blocks):
        for request, num_blocks in enumerate(counts):
            for first in range(0, num_blocks, split):
                taken = min(split, num_blocks - first)
                items.append((request, len(addresses) + first, taken, len(items), rung))
            for _ in range(num_blocks):
                address = int(slots[len(values)]) * slot
                spread = torch.rand(head_dim, generator=generator) * 2 + 0.2
                x = torch.randn(heads, T, head_dim, generator=generator) * spread + 0.3
                y = torch.randn(heads, T, head_dim, generator=generator) * spread - 0.2
                values.append(_write(arena, address, offsets[rung], (k, x), (v, y)))
            addresses += [int(slots[n]) * slot for n in range(len(addresses), len(values))]
        items.append((0, 0, 0, len(items), rung))  # an item without blocks
        item_first.append(len(items))
    q = torch.randn(len(blocks[0]), heads * group, head_dim, generator=generator).bfloat16()
    return Pages(k, v, q, arena, torch.tensor(offsets), torch.tensor(addresses), items, item_first, values)


def _place(k: UniformSide, v: UniformSide, num_rungs: int) -> tuple[list[list[int]], int]:
    """Offsets of K codes, K metadata, V codes and V metadata on each rung, all apart, and the bytes of a slot."""
    sizes = [k.codes_nbytes, k.meta_nbytes, v.codes_nbytes, v.meta_nbytes]
    rows = []
    for rung in range(num_rungs):
        order, at, row = [(i + rung) % 4 for i in range(4)], 16 * rung, [0] * 4
        for i in order:
            row[i] = at
            at += -(-(sizes[i] + 4) // 16) * 16
        rows.append(row)
    return rows, sum(sizes) + 16 * (num_rungs + 8)


def _write(arena: Tensor, address: int, offsets: Sequence[int], *both: tuple[UniformSide, Tensor]) -> Any:
    """Writes K and V of a block; returns their values."""
    values = []
    for i, (side, x) in enumerate(both):
        page = encode(side, x)
        codes, meta = (address + offset for offset in offsets[2 * i : 2 * i + 2])
        arena[codes : codes + side.codes_nbytes] = page.codes
        arena[meta : meta + side.meta_nbytes][page.written] = page.meta[page.written]
        values.append(page.values)
    return tuple(values)


def constexprs(k: UniformSide, v: UniformSide, group: int, tiles: int | None = None) -> dict[str, Any]:
    """Compile-time arguments of the kernel but STAGES and OVERLAP."""
    keys, values = integer_functions(k), integer_functions(v)
    assert isinstance(keys, KeyFunctions) and isinstance(values, ValueFunctions)
    return {
        **NO_BANKS,
        **NO_WINDOW,
        "WINDOW": None,
        "SOFTCAP": None,
        "QUERY": keys.query,
        "SCORES": keys.scores,
        "BEGIN": values.begin,
        "ADD": values.add,
        "FINISH": values.finish,
        "K": k.spec,
        "V": v.spec,
        "TILES": tiles or max(keys.min_tiles, values.min_tiles),
        "H": k.shape.num_kv_heads,
        "G": group,
        "D": k.shape.head_dim,
        "T": T,
        "BLOCK_G": max(4, triton.next_power_of_2(group)),
    }


def attend(
    pages: Pages, first_rung: int, last_rung: int, tiles: int | None = None, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Partial outputs and log-sum-exps of the items of a range of rungs; NaN where nothing is written."""
    _, num_heads, head_dim = pages.q.shape
    heads = pages.k.shape.num_kv_heads
    o = torch.full((pages.num_parts, num_heads, head_dim), float("nan"))
    lse = torch.full((pages.num_parts, num_heads), float("nan"))
    num_items = pages.item_first[last_rung] - pages.item_first[first_rung]
    decode_int_kernel[((num_items + 1) * heads,)](
        pages.q,
        pages.q.stride(0),
        pages.q.stride(1),
        pages.arena,
        pages.offsets,
        torch.tensor(pages.items, dtype=torch.int32),
        torch.tensor(pages.item_first, dtype=torch.int32),
        first_rung,
        last_rung,
        pages.addresses,
        o,
        lse,
        head_dim**-0.5 * LOG2_E,
        **constexprs(pages.k, pages.v, num_heads // heads, tiles),
        STAGES=1,
        OVERLAP=False,
        EARLY=early,
        **FUSED,
    )
    return o, lse


def error(pages: Pages, first_rung: int = 0, last_rung: int | None = None, tiles: int | None = None) -> float:
    """Largest relative error of a request; infinite if the parts written are not those of the launch's items."""
    last_rung = len(pages.item_first) - 1 if last_rung is None else last_rung
    o, lse = attend(pages, first_rung, last_rung, tiles)
    launched = range(pages.item_first[first_rung], pages.item_first[last_rung])
    written = torch.tensor([n in launched and item[2] > 0 for n, item in enumerate(pages.items)])
    for part in (o.flatten(1), lse):
        if not torch.equal(part.isfinite(), written[:, None].expand_as(part)):
            return float("inf")
    errors = [0.0]
    for b in range(len(pages.q)):
        mine = [n for n, item in enumerate(pages.items) if written[n] and item[0] == b]
        if mine:
            weights = torch.exp2(lse[mine].double() - lse[mine].amax(0))[..., None]
            got = (o[mine] * weights).sum(0) / weights.sum(0)
            want = expected(pages, b, mine)
            errors.append(float((got - want).norm() / want.norm()))
    return max(errors)


def expected(pages: Pages, request: int, items: Sequence[int]) -> Tensor:
    """Attention of a request over the blocks of items, in float64."""
    blocks = [n for i in items for n in range(pages.items[i][1], pages.items[i][1] + pages.items[i][2])]
    group = pages.q.shape[1] // pages.k.shape.num_kv_heads
    k, v = (torch.cat([pages.values[n][i] for n in blocks], 1).repeat_interleave(group, 0) for i in (0, 1))
    q = pages.q[request].double()
    scores = torch.einsum("hd,htd->ht", q, k) * pages.q.shape[2] ** -0.5
    return torch.einsum("ht,htd->hd", scores.softmax(-1), v)


def one_page(
    k_bits: int,
    v_bits: int,
    *,
    k_axis: Axis = "channel",
    k_group: int = 128,
    v_group: int = 128,
    head_dim: int = 64,
    group: int = 4,
    tiles: int | None = None,
    eta: Fraction = Fraction(0),
) -> Callable[[], float]:
    """Error for a request of two blocks and one KV head."""

    def run() -> float:
        k, v = sides(k_bits, v_bits, head_dim, k_axis, k_group, v_group, heads=1, eta=eta)
        return error(make_pages(k, v, group, [[2]]), tiles=tiles)

    return run


def early(k_bits: int, v_bits: int, k_axis: Axis) -> Callable[[], float]:
    """Numbers that are others where the first pages are asked for before the wait."""

    def run() -> float:
        pages = make_pages(*sides(k_bits, v_bits, 64, k_axis, 128, 64), 2, [[1, 3], [2, 0], [0, 2]], split=3)
        both = (attend(pages, 0, 3, early=is_early) for is_early in (False, True))
        return float(sum((a.nan_to_num(7.0) != b.nan_to_num(7.0)).sum() for a, b in zip(*both, strict=True)))

    return run


def several_rungs(first_rung: int, last_rung: int) -> Callable[[], float]:
    """Error for two requests on three rungs, of which the launch serves some; one request has no blocks on one."""

    def run() -> float:
        k, v = sides(4, 3, 64, "channel", 64, 32, heads=3)
        return error(make_pages(k, v, 2, [[1, 3], [2, 0], [0, 2]]), first_rung, last_rung)

    return run


def constant_page() -> float:
    """Error for groups of equal elements, whose range is 0."""
    k, v = sides(2, 2, 64, "channel", 32, 32, heads=1)
    pages = make_pages(k, v, 4, [[1]])
    pages.values[0] = _write(
        pages.arena, 0, pages.offsets[0].tolist(), (k, torch.ones(1, T, 64)), (v, torch.full((1, T, 64), 2.0))
    )
    pages.addresses.zero_()
    return error(pages)


def cases() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for k in BITS:
        for v in BITS:
            found[f"K{k} V{v}"] = one_page(k, v)
        found[f"K{k} per token"] = one_page(k, 2, k_axis="token")
        found[f"K{k} groups of 32"] = one_page(k, 4, k_group=32)
        found[f"V{k} groups of 32"] = one_page(4, k, v_group=32, head_dim=128)
        found[f"K{k} V{k} eta"] = one_page(k, k, k_group=32, v_group=32, eta=Fraction(1, 6))
        found[f"K{k} per token eta"] = one_page(k, k, k_axis="token", eta=Fraction(1, 6))
        for d in (80, 256):
            found[f"K{k} V{k} D{d}"] = one_page(k, k, head_dim=d)
            found[f"K{k} V{k} D{d} groups of 32"] = one_page(k, k, head_dim=d, k_group=32, v_group=32)
    found["K2 V3 groups of 64"] = one_page(2, 3, k_group=64, v_group=64, head_dim=96)
    found["V1 D80 groups of 64"] = one_page(3, 1, head_dim=80, k_group=64, v_group=64)
    found["K3 per token D80"] = one_page(3, 3, head_dim=80, k_axis="token")
    for g in (1, 3, 8, 16):
        found[f"G{g}"] = one_page(4, 2, group=g)
    for tiles, bits in ((2, 8), (4, 8), (4, 4)):
        found[f"K{bits} V{bits} in {tiles} tiles"] = one_page(bits, bits, tiles=tiles)
        found[f"K{bits} per token in {tiles} tiles"] = one_page(bits, bits, k_axis="token", tiles=tiles)
    found["K8 groups of 64 in 2 tiles"] = one_page(8, 4, k_group=64, v_group=32)
    found["rungs, all"] = several_rungs(0, 3)
    found["rungs, some"] = several_rungs(1, 2)
    found["rungs, none"] = several_rungs(2, 2)
    found["early"], found["early per token"] = early(4, 4, "channel"), early(4, 2, "token")
    found["range 0"] = constant_page
    return found


if __name__ == "__main__":
    report(cases())
