"""Checks and times the decode attention kernels on a GPU.

python -m studies.kernels.bench_paged_decode --check --time [--bits 16,8,4,2] [--json FILE]

``--check`` compares random shapes and rungs in a poisoned arena with float attention. ``--time`` measures everything
a decode step's attention does in one layer (sink, open block, merge), each copy of the data in turn, so that nothing
stays in L2. eta = bytes that must be read / (time * 4.3e12 B/s).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import DecodeWork
from qkv_engine.kernels.paged_decode.triton import Tuning, paged_decode
from qkv_engine.kernels.tiles import PageFormat

from ..roofline import BANDWIDTH
from .inputs import Case, T, dense_page, encode, make_case, reference, uniform_page
from .timing import time_calls

HEADS, GROUP, HEAD_DIM, SINK = 8, 4, 128, 32
BF16 = torch.bfloat16

# By bits: launch parameters and blocks an item, tried in this order.
VARIANTS: dict[int, tuple[list[Tuning], list[int]]] = {
    16: ([Tuning(2, 3), Tuning(2, 5)], [8, 16, 32]),
    8: ([Tuning(2, 2), Tuning(2, 3)], [8, 16, 32]),
    4: ([Tuning(1, 4), Tuning(1, 5)], [8, 16, 32]),
    2: ([Tuning(1, 4), Tuning(1, 5)], [8, 16, 32]),
}


@dataclass(frozen=True)
class Row:
    """One measurement."""

    batch: int
    length: int
    bits: int
    warps: int
    stages: int
    tile: int
    split: int
    us: float
    eta: float
    tera_elements: float


def check(device: str = "cuda") -> dict[str, float]:
    """Relative RMS error of each case."""
    found = {}
    for name, case in check_cases(device):
        scale = case.q.shape[2] ** -0.5
        work = DecodeWork.build(
            case.addresses,
            case.rungs,
            case.lengths,
            num_rungs=len(case.pages),
            item_blocks=3,
            sink_tokens=case.sink_tokens,
            block_tokens=T,
        )
        layer = LayerFormats.of(case.pages, case.q.device)
        out = paged_decode(case.q, case.arena, work, layer, case.num_kv_heads, scale).float()
        want = reference(case, scale)
        found[name] = float((out - want).norm() / want.norm())
    return found


def check_cases(device: str, base: int = 5 << 30) -> Iterator[tuple[str, Case]]:
    """Random requests over every kind of page."""
    lengths = [1, 31, 127, 128, 129, 300, 1500, 2000]
    for bits in (8, 4, 2):
        for heads, group, dim in ((8, 4, 128), (3, 7, 80)):
            pages = [dense_page(BF16, heads, dim), uniform_page(bits, heads, dim)]
            name = f"int{bits} H{heads} G{group} D{dim}"
            yield name, make_case(pages, lengths, group=group, sink_tokens=20, lookahead=1, device=device)
    pages = [dense_page(BF16, 2, 128), *(uniform_page(b, 2, 128) for b in (8, 4, 2))]
    yield (
        "16/8/4/2 above 5 GiB",
        make_case(pages, lengths, group=4, sink_tokens=32, base=base, device=device),
    )
    for group, dim in ((1, 64), (16, 256)):
        yield f"bf16 G{group} D{dim}", make_case([dense_page(BF16, 2, dim)], lengths, group=group, device=device)
    fp16 = torch.float16
    yield "fp16", make_case([dense_page(fp16, 2, 96)], lengths, group=4, dtype=fp16, device=device)
    fp32 = torch.float32
    yield "fp32", make_case([dense_page(fp32, 2, 64)], lengths, group=4, dtype=fp32, device=device)
    pages = [dense_page(BF16, 2, 128), uniform_page(3, 2, 128, group=32), uniform_page(1, 2, 128, group=64)]
    pages += [uniform_page(8, 2, 128, k_axis="token"), uniform_page((4, 2), 2, 128)]
    yield "float tiles", make_case(pages, lengths, group=4, sink_tokens=20, device=device)


@dataclass(frozen=True)
class LongCase:
    """``tables``: (addresses, rungs) of each copy of the requests, equal in all but place."""

    q: torch.Tensor
    arena: torch.Tensor
    tables: list[tuple[torch.Tensor, torch.Tensor]]
    lengths: torch.Tensor
    pages: list[PageFormat]
    nbytes: int


def long_case(bits: int, batch: int, length: int, copies: int, device: str = "cuda") -> LongCase:
    """Requests of ``length`` tokens: a sink, full blocks of ``bits`` and an open block, in random order."""
    dense = dense_page(BF16, HEADS, HEAD_DIM)
    page = dense if bits == 16 else uniform_page(bits, HEADS, HEAD_DIM)
    num_full, num_open = divmod(length - SINK, T)
    per_request = 2, num_full  # dense slots (sink and open block) and full blocks
    count = [batch * copies * n for n in per_request]
    slot = [p.k.nbytes + p.v.nbytes for p in (dense, page)]
    arena = torch.empty(count[0] * slot[0] + count[1] * slot[1], dtype=torch.uint8, device=device)
    x = torch.randn(16, HEADS, T, HEAD_DIM, device=device)
    starts = (0, count[0] * slot[0])
    places = []
    for p, n, size, start in zip((dense, page), count, slot, starts, strict=True):
        unique = torch.cat([encode(p.k, x, "k")[0], encode(p.v, x, "v")[0]], 1)
        rows = arena[start : start + n * size].view(n, size)
        for first in range(0, n, len(unique)):
            rows[first : first + len(unique)] = unique[: n - first]
        places.append((torch.randperm(n, device=device) * size + start).view(copies, batch, -1))
    tables = []
    for low, full in zip(*places, strict=True):
        addresses = torch.cat((low[:, :1], full, low[:, 1:]), 1)
        rungs = torch.full_like(addresses, 0 if bits == 16 else 1)
        rungs[:, 0] = rungs[:, -1] = 0
        tables.append((addresses, rungs))
    q = torch.randn(batch, HEADS * GROUP, HEAD_DIM, device=device).to(BF16)
    dense_tokens = (SINK + num_open) * batch
    nbytes = num_full * batch * slot[1] + dense_tokens * slot[0] // T
    pages = [dense] if bits == 16 else [dense, page]
    return LongCase(q, arena, tables, torch.full((batch,), length, device=device), pages, nbytes)


def calls(case: LongCase, split: int, tuning: Tuning) -> list[Callable[[], Any]]:
    """One attention call a copy; sinks and open blocks beside quantized pages keep their default launch."""
    found: list[Callable[[], Any]] = []
    layer = LayerFormats.of(case.pages, case.q.device)
    for addresses, rungs in case.tables:
        work = DecodeWork.build(
            addresses,
            rungs,
            case.lengths,
            num_rungs=len(case.pages),
            item_blocks=split,
            sink_tokens=SINK,
            block_tokens=T,
        )

        def call(work: DecodeWork = work) -> Any:
            return paged_decode(case.q, case.arena, work, layer, HEADS, HEAD_DIM**-0.5, tuning=tuning)

        found.append(call)
    return found


def measure(bits: int, batch: int, length: int) -> Iterator[Row]:
    """Every variant at one size, the failing ones left out."""
    tokens = batch * length
    nbytes = tokens * HEADS * HEAD_DIM * 2 * bits // 8
    case = long_case(bits, batch, length, copies=max(2, min(8, int(1.2e9 / nbytes) + 1)))
    tunings, splits = VARIANTS[bits]
    for tuning in tunings:
        for split in splits:
            try:
                us = 1e6 * time_calls(calls(case, split, tuning))
            except Exception as error:
                print(f"  {bits} bits {tuning} split {split}: {type(error).__name__} {str(error)[:80]}")
                continue
            eta = case.nbytes / (us * 1e-6 * BANDWIDTH)
            elements = 2 * tokens * HEADS * HEAD_DIM / us / 1e6
            t = tuning
            yield Row(
                batch,
                length,
                bits,
                t.num_warps,
                t.num_stages,
                t.tile,
                split,
                us,
                eta,
                elements,
            )


def breakdown(bits: int, batch: int, length: int, split: int, tuning: Tuning) -> dict[str, float]:
    """Microseconds a call of each kernel, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    todo = calls(long_case(bits, batch, length, copies=4), split, tuning)
    for call in todo:
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for call in todo:
            call()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / len(todo) for e in prof.key_averages() if e.key.endswith("kernel")}


def print_row(row: Row) -> None:
    print(
        f"{row.batch:4} x {row.length:6} {row.bits:3} bits  warps {row.warps} stages {row.stages} tile {row.tile:3} "
        f"split {row.split:3} {row.us:8.1f} us  eta {row.eta:.3f}  {row.tera_elements:6.2f} T/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--bits", default="2,4,8,16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if args.check:
        result["errors"] = check()
        for name, error in result["errors"].items():
            print(f"{name:28} relative error {error:.2e} {'' if error <= 3e-3 else 'TOO LARGE'}", flush=True)
        assert all(error <= 3e-3 for error in result["errors"].values()), "kernels are wrong: nothing is timed"
    rows: list[Row] = []
    best: list[Row] = []
    for bits in map(int, args.bits.split(",")) if args.time else ():
        for batch, length in ((64, 8192), (1, 131072)):
            here = []
            for row in measure(bits, batch, length):
                print_row(row)
                here.append(row)
            rows += here
            if here:
                best.append(min(here, key=lambda r: r.us))
    if best:
        print("best")
    for row in best:
        print_row(row)
        tuning = Tuning(row.warps, row.stages, row.tile)
        try:
            parts = breakdown(row.bits, row.batch, row.length, row.split, tuning)
            print("    " + "  ".join(f"{name} {us:.1f} us" for name, us in parts.items()))
        except Exception as error:
            print(f"    no breakdown: {error}")
    result |= {"rows": [asdict(r) for r in rows], "best": [asdict(r) for r in best]}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
