"""Checks and times the decode attention kernels on a GPU.

python -m studies.kernels.bench_paged_decode --check --time [--formats K4V4,K2V2g32] [--queries 4,8] [--tune]
    [--window 4096]

``--check`` compares random shapes and rungs in a poisoned arena with float attention. ``--time`` measures everything
a decode step's attention does in one layer (sink, open block, merge), each copy of the data in turn, so that nothing
stays in L2. eta = bytes that must be read / (time * 4.3e12 B/s). ``--tune`` tries other launch parameters, too.
``--window`` adds measurements of layers that see so many tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import DecodeWork
from qkv_engine.kernels.paged_decode.triton import Tuning, paged_decode

from .inputs import (
    ALIGN,
    PATTERN_SHAPES,
    Case,
    T,
    dense_page,
    make_case,
    named_page,
    pattern_page,
    reference,
    shared_page,
    uniform_page,
    write_patterns,
)
from .timing import time_calls

HEADS, HEAD_DIM, SINK = 8, 128, 32
GROUP = 4  # query heads a KV head, where no other number is asked for
BF16 = torch.bfloat16
KITTY_V = "int2-token-128"  # V beside Kitty's K, as in its paper
GRADED = {  # layouts of K and V by code bits an element; the last as plans of 1.75 and 1.4 bits have them
    "graded-1.25": ("graded-16x4-48x2",) * 2,
    "graded-1.5": ("graded-32x4-32x2",) * 2,
    "graded-2": ("graded-16x8-16x4-32x2",) * 2,
    "spectral-1.5": ("graded-64x4", "graded-16x8"),
    "spectral-1.25": ("graded-32x4-32x2", "graded-16x8"),
}
SPLITS = (8, 16, 32)  # blocks an item
TUNINGS = [Tuning(w, s) for w, s in ((1, 3), (1, 4), (1, 5), (2, 2), (2, 3), (2, 5))]


def named_pages() -> dict[str, PageLayout]:
    """Pages by name: K's format; or bits of K and V, "t" for K per token, "g" and the elements of a smaller group,
    "eta" for calibrated levels, "shared" for V's codes in the layer below, "P" and the number of patterns; and those of
    ``GRADED``.
    """
    pairs = [(8, 8), (8, 4), (4, 4), (4, 2), (3, 3), (3, 2), (2, 4), (2, 2), (2, 1), (1, 1)]
    found = {"16": dense_page(BF16, HEADS, HEAD_DIM)}
    found |= {f"K{k}V{v}": uniform_page((k, v), HEADS, HEAD_DIM) for k, v in pairs}
    found |= {f"K{k}tV{v}": uniform_page((k, v), HEADS, HEAD_DIM, k_axis="token") for k, v in ((4, 4), (4, 2), (2, 2))}
    groups = [(4, 4, 64), (2, 2, 64), (4, 4, 32), (3, 4, 32), (2, 2, 32)]
    found |= {f"K{k}V{v}g{g}": uniform_page((k, v), HEADS, HEAD_DIM, group=g) for k, v, g in groups}
    found |= {f"K{b}V{b}eta": calibrated_page(b, HEADS) for b in (2, 1)}
    eta = {2: "eta0.045", 1: "eta0.2"}
    for k, v in ((2, 2), (2, 1), (1, 1)):
        names = f"int{k}-channel-{T}-{eta[k]}", f"int{v}-token-{T}-{eta[v]}"
        found[f"K{k}V{v}shared"] = shared_page(*names, HEADS, HEAD_DIM)
    found |= {f"K{b}V{b}P{m}": pattern_page(b, m, HEADS, HEAD_DIM) for b, m in ((4, 32), (2, 32), (2, 64), (2, 128))}
    found |= {name: named_page(*pair, HEADS, HEAD_DIM) for name, pair in GRADED.items()}
    return found | {name: named_page(name, KITTY_V, HEADS, HEAD_DIM) for name in ("kitty-12.5", "kitty-25")}


def calibrated_page(bits: int, heads: int, group: int = T) -> PageLayout:
    """K per channel and V per token, a tenth of the range between its ends and the levels."""
    return named_page(f"int{bits}-channel-{group}-eta0.1", f"int{bits}-token-{group}-eta0.1", heads, HEAD_DIM)


@dataclass(frozen=True)
class Row:
    """One measurement. ``limit_us``: time to read the needed bytes at the bandwidth; ``window``: tokens seen."""

    format: str
    batch: int
    length: int
    queries: int
    stored_bits: float
    tuning: str
    split: int
    us: float
    limit_us: float
    eta: float
    window: int | None = None


class Rule(NamedTuple):
    """What attention computes beside scores and values."""

    window: int | None = None
    softcap: float | None = None
    null_logits: torch.Tensor | None = None


def check(device: str = "cuda") -> dict[str, float]:
    """Relative RMS errors by case."""
    found = {}
    for name, case in check_cases(device):
        scale = case.q.shape[2] ** -0.5
        layer, nulls = LayerFormats.of(case.pages, case.q.device), torch.randn(case.q.shape[1], device=device)
        rules = {"": Rule(), " window": Rule(200), " soft cap, null logits": Rule(1000, 5.0, nulls)}
        for suffix, (window, softcap, null_logits) in rules.items():
            work = DecodeWork.build(
                case.addresses,
                case.rungs,
                case.lengths,
                num_rungs=len(case.pages),
                item_blocks=3,
                sink_tokens=case.sink_tokens,
                block_tokens=T,
                banks=case.banks,
                window=window,
            )
            out = paged_decode(case.q, case.arena, work, layer, scale, None, None, softcap, null_logits).float()
            want = reference(case, scale, window=window, softcap=softcap, null_logits=null_logits)
            found[name + suffix] = float((out - want).norm() / want.norm())
    return found


def check_cases(device: str) -> Iterator[tuple[str, Case]]:
    """Random requests over every kind of page."""
    lengths = [1, 31, 127, 128, 129, 300, 1500, 2000]
    for bits in (8, 4, 2):
        for heads, group, dim in ((8, 4, 128), (3, 7, 80)):
            pages = [dense_page(BF16, heads, dim), uniform_page(bits, heads, dim)]
            name = f"int{bits} H{heads} G{group} D{dim}"
            yield name, make_case(pages, lengths, group=group, sink_tokens=20, lookahead=1, device=device)
    pages = [dense_page(BF16, 2, 128), *(uniform_page(b, 2, 128) for b in (8, 4, 2))]
    far = make_case(pages, lengths, group=4, sink_tokens=32, base=5 << 30, device=device)
    yield "16/8/4/2 above 5 GiB", far
    for group, dim in ((1, 64), (16, 256)):
        yield f"bf16 G{group} D{dim}", make_case([dense_page(BF16, 2, dim)], lengths, group=group, device=device)
    fp16 = torch.float16
    yield "fp16", make_case([dense_page(fp16, 2, 96)], lengths, group=4, dtype=fp16, device=device)
    fp32 = torch.float32
    yield "fp32", make_case([dense_page(fp32, 2, 64)], lengths, group=4, dtype=fp32, device=device)
    pages = [dense_page(BF16, 2, 128), uniform_page(3, 2, 128, group=32), uniform_page(1, 2, 128, group=64)]
    pages += [uniform_page(8, 2, 128, k_axis="token"), uniform_page((4, 2), 2, 128)]
    yield "3, 1, 8 and 4/2 bits", make_case(pages, lengths, group=4, sink_tokens=20, device=device)
    pages = [dense_page(BF16, 2, 128), *(calibrated_page(bits, 2, group) for bits in (8, 2, 1) for group in (128, 32))]
    yield "calibrated", make_case(pages, lengths, group=4, device=device)
    shared = [shared_page(f"int{b}-channel-128", f"int{b}-token-128-eta0.1", 2, 128) for b in (2, 1)]
    yield "codes of the layer below", make_case([pages[0], *shared], lengths, group=4, sink_tokens=20, device=device)
    for heads, group, dim in ((8, 4, 128), (8, 1, 128), (2, 8, 128), (3, 7, 80), (2, 3, 64), (1, 4, 256), (1, 2, 24)):
        shares = [named_page(f"kitty-{share}", KITTY_V, heads, dim) for share in ("12.5", "25", "0", "100")]
        pages = [dense_page(BF16, heads, dim), *shares]
        yield f"kitty H{heads} G{group} D{dim}", make_case(pages, lengths, group=group, sink_tokens=20, device=device)
    pages = [dense_page(BF16, 2, 128), *(named_page("kitty-25", v, 2, 128) for v in ("int4-token-32", "dense16"))]
    yield "kitty beside other V", make_case(pages, lengths, group=4, device=device)
    for number, heads, group, dim in PATTERN_SHAPES:
        pages = [dense_page(BF16, heads, dim), *(pattern_page(bits, number, heads, dim) for bits in (4, 2, 1))]
        name = f"patterns{number} H{heads} G{group} D{dim}"
        yield name, make_case(pages, lengths, group=group, sink_tokens=20, device=device)
    for heads, group, dim in ((8, 4, 128), (2, 8, 128), (3, 7, 80), (1, 4, 256)):
        pages = [dense_page(BF16, heads, dim), *(named_page(*pair, heads, dim) for pair in GRADED.values())]
        yield f"graded H{heads} G{group} D{dim}", make_case(pages, lengths, group=group, sink_tokens=20, device=device)
    pages = [dense_page(BF16, 2, 128), *(uniform_page(4, 2, 128, k_axis="token", group=g) for g in (32, 64))]
    yield "float tiles", make_case(pages, lengths, group=4, sink_tokens=20, device=device)


@dataclass(frozen=True)
class LongCase:
    """Copies of the same requests to time. ``tables``: (addresses, rungs, banks) of each copy, unlike in place."""

    q: torch.Tensor
    arena: torch.Tensor
    tables: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    lengths: torch.Tensor
    pages: list[PageLayout]
    nbytes: int


def long_case(
    page: PageLayout, batch: int, length: int, copies: int, queries: int = GROUP, device: str = "cuda"
) -> LongCase:
    """Requests of ``length`` tokens: a sink, full blocks of ``page`` and an open block, in random order."""
    dense = dense_page(BF16, HEADS, HEAD_DIM)
    is_dense = page.k.dense_dtype is not None
    num_full, num_open = divmod(length - SINK, T)
    per_request = 2, num_full  # dense slots (sink and open block) and full blocks
    count = [batch * copies * n for n in per_request]
    slot = [-(-p.span[1] // ALIGN) * ALIGN for p in (dense, page)]
    starts = (0, count[0] * slot[0], count[0] * slot[0] + count[1] * slot[1])
    bank = page.k.bank_nbytes + page.v.bank_nbytes
    arena = torch.zeros(starts[2] + batch * copies * bank, dtype=torch.uint8, device=device)
    banks = (starts[2] + torch.randperm(batch * copies, device=device) * bank).view(copies, batch)
    contents = _fill_banks(arena[starts[2] :], page)
    places = []
    for p, n, size, start in zip((dense, page), count, slot, starts[:2], strict=True):
        unique = _slots(p, size, contents)
        rows = arena[start : start + n * size].view(n, size)
        for first in range(0, n, len(unique)):
            rows[first : first + len(unique)] = unique[: n - first]
        places.append((torch.randperm(n, device=device) * size + start).view(copies, batch, -1))
    tables = []
    for low, full, mine in zip(*places, banks, strict=True):
        addresses = torch.cat((low[:, :1], full, low[:, 1:]), 1)
        rungs = torch.full_like(addresses, 0 if is_dense else 1)
        rungs[:, 0] = rungs[:, -1] = 0
        tables.append((addresses, rungs, mine))
    q = torch.randn(batch, HEADS * queries, HEAD_DIM, device=device).to(BF16)
    dense_tokens = (SINK + num_open) * batch
    nbytes = batch * (num_full * (page.k.nbytes + page.v.nbytes) + bank) + dense_tokens * slot[0] // T
    pages = [dense] if is_dense else [dense, page]
    return LongCase(q, arena, tables, torch.full((batch,), length, device=device), pages, nbytes)


def _slots(page: PageLayout, nbytes: int, contents: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Slots of a block with K and V of the page as ``_fill_banks`` made them: [n, nbytes] uint8."""
    slots = torch.zeros(len(contents[0][0]), nbytes, dtype=torch.uint8, device=contents[0][0].device)
    rows = page.rows(slots[:, slice(*page.span)])
    for side, out, (x, bank) in zip((page.k, page.v), rows, contents, strict=True):
        patterns = bank.expand(len(x), -1) if side.bank_nbytes else None
        out.copy_(side.family.quantize(x, side, patterns))
    return slots


def _fill_banks(banks: torch.Tensor, page: PageLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same patterns in every bank; tokens around them [16, H, T, D] and the patterns [1, bank_nbytes], K and V."""
    generator, found = torch.Generator().manual_seed(0), []
    one = torch.zeros(page.k.bank_nbytes + page.v.bank_nbytes, dtype=torch.uint8)
    for side, start in ((page.k, 0), (page.v, page.k.bank_nbytes)):
        x = torch.randn(16 * T, HEADS, HEAD_DIM, generator=generator)
        x = write_patterns(one, start, side, x, generator).view(16, T, HEADS, HEAD_DIM).transpose(1, 2)
        found.append((x.to(banks.device), one[None, start : start + side.bank_nbytes].to(banks.device)))
    if len(one):
        banks.view(-1, len(one))[:] = one.to(banks.device)
    return found


def calls(case: LongCase, split: int, tuning: Tuning | None, window: int | None = None) -> list[Callable[[], Any]]:
    """One attention call a copy; sinks and open blocks beside quantized pages keep their default launch."""
    found: list[Callable[[], Any]] = []
    layer = LayerFormats.of(case.pages, case.q.device)
    for addresses, rungs, banks in case.tables:
        work = DecodeWork.build(
            addresses,
            rungs,
            case.lengths,
            num_rungs=len(case.pages),
            item_blocks=split,
            sink_tokens=SINK,
            block_tokens=T,
            banks=banks if case.pages[-1].has_bank else None,
            window=window,
        )

        def call(work: DecodeWork = work) -> Any:
            return paged_decode(case.q, case.arena, work, layer, HEAD_DIM**-0.5, tuning=tuning)

        found.append(call)
    return found


def measure(
    name: str, batch: int, length: int, queries: int, tunings: list[Tuning | None], windows: list[int | None]
) -> Iterator[Row]:
    """Every variant at one size, the failing ones left out."""
    page = named_pages()[name]
    side_bits = 8 * (page.k.nbytes + page.v.nbytes) / (2 * HEADS * T * HEAD_DIM)
    nbytes = batch * length * HEADS * HEAD_DIM * 2 * side_bits / 8
    case = long_case(page, batch, length, copies=max(2, min(8, int(1.2e9 / nbytes) + 1)), queries=queries)
    for window, tuning in product(windows, tunings):
        for split in SPLITS:
            try:
                us = 1e6 * time_calls(calls(case, split, tuning, window))
            except Exception as error:
                print(f"  {name} {tuning} split {split}: {type(error).__name__} {str(error)[:80]}")
                continue
            limit = 1e6 * case.nbytes * min(1.0, (window or length) / length) / BANDWIDTH
            launch = "default" if tuning is None else f"{tuning.num_warps} warps {tuning.num_stages} stages"
            yield Row(name, batch, length, queries, side_bits, launch, split, us, limit, limit / us, window)


def print_row(row: Row) -> None:
    print(
        f"{row.format:13} {row.batch:3} x {row.length:6} G {row.queries}  {row.stored_bits:5.2f} bits  {row.tuning:16} "
        f"split {row.split:3} {row.us:8.1f} us  limit {row.limit_us:7.1f}  eta {row.eta:.3f}"
        + ("" if row.window is None else f"  window {row.window}"),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--formats", default=",".join(named_pages()))
    parser.add_argument("--queries", default="4")
    parser.add_argument("--sizes", default="64x8192")
    parser.add_argument("--window", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if args.check:
        result["errors"] = check()
        for name, error in result["errors"].items():
            print(f"{name:44} relative error {error:.2e} {'' if error <= 3e-3 else 'TOO LARGE'}", flush=True)
        assert all(error <= 3e-3 for error in result["errors"].values()), "kernels are wrong: nothing is timed"
    tunings: list[Tuning | None] = [None, *(TUNINGS if args.tune else [])]
    windows: list[int | None] = [None, *([args.window] if args.window else [])]
    best: list[Row] = []
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
    for queries in map(int, args.queries.split(",")) if args.time else ():
        for batch, length in sizes:
            for name in args.formats.split(","):
                found = list(measure(name, batch, length, queries, tunings, windows))
                for window in windows:
                    rows = sorted((row for row in found if row.window == window), key=lambda row: row.us)
                    best += rows[:1]
                    for row in rows[: 4 if args.tune else 1]:
                        print_row(row)
    result["best"] = [asdict(row) for row in best]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
