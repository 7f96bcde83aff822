"""Checks and times the small fused kernels on a GPU: RMSNorm, SwiGLU, and q/k norm with rotation and KV write.

python -m studies.kernels.bench_small [--tokens 1,32,256,2048] [--json FILE]

share = bytes that must be moved / (time * 4.3e12 B/s), on copies of the inputs that together exceed L2 (a few tokens
always fit there). ``after`` is the time that the kernel adds to a product of 4096 x 4096 weights before it, as in a
layer, and ``waits`` the same without overlapping launches; ``torch`` are the separate operators.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.overlap import overlap_options
from qkv_engine.kernels.rms_norm import add_rms_norm, rms_norm
from qkv_engine.kernels.rms_norm import reference as rms_norm_reference
from qkv_engine.kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from qkv_engine.kernels.swiglu import reference as swiglu_reference
from qkv_engine.kernels.swiglu import swiglu
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.rope import RopeConfig, RotaryEmbedding
from qkv_engine.models.shapes import SHAPES

from .small_cases import Case, make_cases
from .timing import time_calls
from .token_rows import token_rows

BOUND = {torch.float32: 16.0, torch.bfloat16: 2.0, torch.float16: 2.0}  # roundings of the dtype
ALONE = {"OVERLAP": False}
TILES = ("ROWS", "TILE", "TILE_H", "TILE_N", "BLOCK_K")  # of launch parameters, which a row names

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One measurement; ``after``, ``waits`` and ``torch`` only for the default launch parameters."""

    shape: str
    kernel: str
    tokens: int
    launch: str
    nbytes: int
    us: float
    share: float
    after: float | None = None
    waits: float | None = None
    torch: float | None = None


def check() -> dict[str, float]:
    """The largest error of each kernel, in roundings of its dtype."""
    found = {}
    for dtype in BOUND:
        for size, tokens in ((7, 5), (576, 33), (4096, 257), (5120, 3), (16384, 2)):
            found[f"rms_norm {dtype} {tokens} x {size}"] = check_norm(size, tokens, dtype)
        for inner, tokens in ((5, 3), (14336, 65), (11008, 2)):
            x = (3 * torch.randn(tokens, 2 * inner, device="cuda")).to(dtype)
            found[f"swiglu {dtype} {tokens} x {inner}"] = roundings(swiglu(x), swiglu_reference.swiglu(x))
        for heads, kv_heads, dim in ((32, 8, 128), (7, 1, 80), (6, 3, 64), (16, 8, 256)):
            for norm in (False, True):
                name = f"rope_kv_write {dtype} {heads}/{kv_heads} D{dim}{' norm' if norm else ''}"
                found[name] = check_rope(heads, kv_heads, dim, dtype, norm)
    return found


def check_norm(size: int, tokens: int, dtype: torch.dtype) -> float:
    x, residual = torch.randn(2, tokens, size, device="cuda").to(dtype)
    weight = (1 + torch.randn(size, device="cuda") / 4).to(dtype)
    torch.cuda.synchronize()
    error = roundings(rms_norm(x, weight, 1e-6), rms_norm_reference.rms_norm(x, weight, 1e-6))
    total = x + residual
    found = add_rms_norm(x, residual, weight, 1e-6)
    if not torch.equal(residual, total):
        return float("inf")
    return max(error, roundings(found, rms_norm_reference.rms_norm(total, weight, 1e-6)))


def check_rope(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norm: bool) -> float:
    """The error for sinks, blocks beyond 2^31 elements and padding, in an arena of NaNs."""
    layers, block, sink, num_blocks, row_nbytes = 2, 128, 32, 30, dim * dtype.itemsize
    slot_nbytes = layers * 2 * kv_heads * block * row_nbytes
    base = -(-(2**31) * dtype.itemsize // slot_nbytes)  # slots before those in use
    memory = torch.full(((base + num_blocks + 1) * slot_nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
    pages = memory.view(dtype).view(-1, dim)
    slots = (base + 1 + torch.randperm(num_blocks, device="cuda").view(3, 10)) * slot_nbytes
    slots[:, 0] = torch.arange(3, device="cuda") * (slot_nbytes // block * sink)
    requests = torch.tensor([0, 1, 2, 2, 2, 0, 1, 2], device="cuda")
    positions = torch.tensor([0, 31, 32, 33, 1183, 400, -1, 7], device="cuda")
    rows = token_rows(slots, requests, positions, sink_tokens=sink, block_tokens=block, row_nbytes=row_nbytes)
    cos, sin = RotaryEmbedding(RopeConfig(), dim)(positions)
    qkv = torch.randn(len(rows), heads + 2 * kv_heads, dim, device="cuda").to(dtype)
    weight = (1 + torch.randn(heads + kv_heads, dim, device="cuda") / 4).to(dtype) if norm else None
    expected_qkv, expected = qkv.clone(), torch.full((2**14, dim), float("nan"), dtype=dtype, device="cuda")
    written = rows[:, 0] >= 0
    near = torch.stack((torch.where(written, torch.arange(len(rows), device="cuda") * 128, -1), rows[:, 1] * 0 + 1), 1)
    torch.cuda.synchronize()
    q = rope_kv_write(qkv, cos, sin, rows, pages, 1, kv_heads, weight, 1e-6)
    expected_q = rope_kv_write_reference(expected_qkv, cos, sin, near, expected, 1, kv_heads, weight, 1e-6)
    places = 2 * kv_heads + torch.arange(2 * kv_heads, device="cuda")
    stored = pages[rows[written, :1] + places * rows[written, 1:]]
    wanted = expected[near[written, :1] + places]
    num_stored = sum(int((~part.isnan()).all(1).sum()) for part in pages.chunk(256))
    if num_stored != stored.shape[0] * stored.shape[1] or not torch.equal(stored[:, kv_heads:], wanted[:, kv_heads:]):
        return float("inf")
    return max(roundings(a, b, pair_norm(b)) for a, b in ((q, expected_q), (stored, wanted)))


def roundings(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference in units of the dtype's relative rounding of ``expected``, or of ``scale``."""
    unit = torch.finfo(expected.dtype).eps * (expected if scale is None else scale).abs().double().clamp(min=1e-4)
    return float(((found.double() - expected.double()).abs() / unit).max())


def pair_norm(x: Tensor) -> Tensor:
    """The length of each rotated pair, which a rotation keeps: its components may cancel."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.hypot(first, second).repeat(1, 1, 2)


def measure(shape: str, case: Case, products: list[Call]) -> Iterator[Row]:
    """Every variant of a case, the failing ones left out."""
    overlap = overlap_options(torch.device("cuda"))
    for number, (constexprs, warps) in enumerate(case.variants):
        tiles = " ".join(
            f"{key} {constexprs[key]}" for key in ("ROWS", "TILE", "TILE_H", "TILE_N", "BLOCK_K") if key in constexprs
        )
        try:
            us = 1e6 * time_calls([partial(launch, constexprs, warps, overlap) for launch in case.launches])
        except Exception as error:
            print(f"  {case.kernel} {tiles} warps {warps}: {type(error).__name__} {str(error)[:80]}")
            continue
        share = case.nbytes / (us * 1e-6 * BANDWIDTH)
        row = Row(shape, case.kernel, case.tokens, f"{tiles} warps {warps}", case.nbytes, us, share)
        if number:
            yield row
            continue
        after, waits = (
            added([partial(launch, constexprs, warps, options) for launch in case.launches], products)
            for options in (overlap, ALONE)
        )
        apart = 1e6 * time_calls(case.separate)
        yield Row(**{**asdict(row), "after": after, "waits": waits, "torch": apart})


def added(calls: list[Call], products: list[Call]) -> float:
    """Microseconds that each call adds to the product before it."""
    pairs = list(zip(cycle(products), calls, strict=False))
    together = time_calls(list(chain.from_iterable(pairs)))
    return 1e6 * (2 * together - time_calls([product for product, _ in pairs]))


def make_products(tokens: int) -> list[Call]:
    """Products with eight weights of 4096 x 4096, which together exceed L2."""
    x = torch.randn(tokens, 4096, device="cuda").bfloat16()
    weights = [torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(8)]
    return [partial(torch.nn.functional.linear, x, weight) for weight in weights]


def print_row(row: Row) -> None:
    in_layer = ""
    if row.after is not None:
        in_layer = f"  after {row.after:6.2f} us  waits {row.waits:6.2f} us  torch {row.torch:7.2f} us"
    print(
        f"{row.shape:14} {row.kernel:25} {row.tokens:5} tokens  {row.launch:20} {row.nbytes / 1e6:8.3f} MB "
        f"{row.us:7.2f} us  share {row.share:.3f}{in_layer}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,32,256,2048")
    parser.add_argument("--shapes", default="llama-3.1-8b,qwen3-8b")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["errors"] = check()
    bounds = {f" {dtype} ": bound for dtype, bound in BOUND.items()}
    wrong = 0
    for name, error in result["errors"].items():
        is_right = error <= next(bound for part, bound in bounds.items() if part in name)
        wrong += int(not is_right)
        print(f"{name:48} {error:7.3f} roundings {'' if is_right else 'TOO LARGE'}", flush=True)
    rows: list[Row] = []
    for shape in args.shapes.split(",") if not wrong else ():
        for tokens in map(int, args.tokens.split(",")):
            products = make_products(tokens)
            for case in make_cases(config_from_hf(SHAPES[shape]), tokens):
                for row in measure(shape, case, products):
                    print_row(row)
                    rows.append(row)
    result["rows"] = [asdict(row) for row in rows]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if wrong:
        raise SystemExit(f"{wrong} kernels are wrong: nothing is timed")


if __name__ == "__main__":
    main()
