"""Checks and times products of few rows on a GPU, beside torch's.

python -m studies.kernels.bench_linear [--check] [--time] [--shape qwen3-8b] [--rows 1,2,4,8] [--json FILE]

share = bytes of the weight / (time * 4.3e12 B/s), on copies of the weight that together exceed L2. ``ours`` is as the
engine launches; the tunings tried are listed by the time of all products of a model, as the line to paste.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.linear import linear, linear_sums, linear_swiglu, reference
from qkv_engine.kernels.linear.triton import (
    MAX_ROWS,
    TILES,
    SumTuning,
    TileTuning,
    few_rows_variant,
    linear_few_rows,
    linear_splits,
    linear_sum_kernel,
)
from qkv_engine.kernels.overlap import overlap_options
from qkv_engine.kernels.rms_norm import add_rms_norm
from qkv_engine.kernels.swiglu import swiglu
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES

from .timing import time_calls

WEIGHTS_NBYTES = 400 << 20  # of the copies of a weight, eight times the L2 cache
SPLIT_CHECKS = ((4096, 2560, torch.float16), (9216, 2560, torch.bfloat16))
CHECKS = (  # columns and rows of the weight
    (80, 38, torch.float16),
    (4096, 4100, torch.bfloat16),
    (11008, 96, torch.bfloat16),
)
BOUND = 1.5  # of what rounding allows

Product = Callable[..., Any]
LayerProduct = Callable[[Tensor], Any]  # with its weight
Tuning = SumTuning | TileTuning


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds of a product, and its share of the bandwidth."""

    product: str
    rows: int
    launch: str
    us: float
    share: float


def sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of a layer and of the output embedding."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    layer = {"qkv": (qkv, hidden), "o": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    return layer | {"lm_head": (config.vocab_size, hidden)}


def tunings(num_rows: int) -> list[Tuning]:
    """Launch parameters to try."""
    sums = [SumTuning(columns, loads) for columns in (512, 1024, 2048) for loads in (8, 16)]
    shapes: list[tuple[int, int, int, int]]
    shapes = [(16, 256, 1, 4), (16, 512, 1, 4), (32, 256, 2, 5), (32, 256, 2, 3), (64, 128, 4, 5), (64, 256, 4, 4)]
    if num_rows > 8:
        shapes = [(16, 256, 2, 5), (32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4)]
        shapes += [
            (16, 512, 2, 4),
            (32, 128, 2, 6),
            (32, 256, 2, 4),
            (64, 128, 4, 3),
            (64, 256, 4, 3),
            (128, 128, 4, 4),
        ]
    block_m = next(size for size in TILES if size >= min(num_rows, max(TILES)))
    tiles = [TileTuning(block_m, *shape) for shape in shapes]
    return [*(sums if num_rows == 1 else ()), *tiles]


def check() -> dict[str, float]:
    """Each case's largest difference from float64, as a part of half a rounding and 2^-20 of the products' sizes.

    Infinity where a second run differs, or SwiGLU inside the product from SwiGLU behind it.
    """
    found = {}
    for size, num_out, dtype in CHECKS:
        weight, bias = _random(num_out, size).to(dtype), _random(num_out).to(dtype)
        for num_rows in (1, 2, 3, MAX_ROWS):
            x = _random(num_rows, size).to(dtype)
            exact = reference.linear(x.double(), weight.double(), bias.double())
            scale = reference.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
            allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-20 * scale
            out = linear(x, weight, bias)
            is_same = torch.equal(out, linear(x, weight, bias))
            is_same &= torch.equal(swiglu(out), linear_swiglu(x, weight, bias))
            error = float(((out.double() - exact).abs() / allowed).max())
            found[f"{dtype} {num_rows} x {size} x {num_out}"] = error if is_same else float("inf")
    for size, num_out, dtype in SPLIT_CHECKS:
        for num_rows in (9, 17, MAX_ROWS):
            found[f"{dtype} {num_rows} x {size} x {num_out} in splits"] = check_splits(num_rows, size, num_out, dtype)
    return found


def check_splits(num_rows: int, size: int, num_out: int, dtype: torch.dtype) -> float:
    """The same of the sum of splits; infinity, too, where a norm that adds them differs from one of their sum."""
    x, residual, weight, bias = (
        _random(*shape).to(dtype) for shape in ((num_rows, size), (num_rows, num_out), (num_out, size), (num_out,))
    )
    splits = linear_splits(x, weight, bias)
    out = reference.add_sums(splits, dtype)
    is_same = torch.equal(splits.sums, linear_splits(x, weight, bias).sums)
    residuals = residual.clone(), residual.clone()
    norms = add_rms_norm(out, residuals[0], bias, 1e-6), add_rms_norm(splits, residuals[1], bias, 1e-6)
    is_same &= torch.equal(*norms) and torch.equal(*residuals)
    exact = reference.linear(x.double(), weight.double(), bias.double())
    scale = reference.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-20 * scale
    return float(((out.double() - exact).abs() / allowed).max()) if is_same else float("inf")


class Wanted(NamedTuple):
    """One kernel to compile."""

    num_rows: int
    num_out: int
    size: int
    gated: bool
    tuning: Tuning | None = None
    dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None


def checked() -> Iterator[Wanted]:
    """Kernels that ``check`` runs."""
    for (size, num_out, dtype), num_rows, gated in itertools.product(CHECKS, (1, MAX_ROWS), (False, True)):
        yield Wanted(num_rows, num_out, size, gated, None, dtype, dtype)


def timed(config: ModelConfig, row_numbers: list[int]) -> Iterator[Wanted]:
    """Kernels that are timed."""
    for num_rows, (num_out, size) in itertools.product(row_numbers, sizes(config).values()):
        if num_rows <= MAX_ROWS:
            yield from (Wanted(num_rows, num_out, size, False, t) for t in (None, *tunings(num_rows)))
            if size == config.hidden_size:
                yield Wanted(num_rows, num_out, size, True)


def compile_all(kernels: Iterable[Wanted]) -> None:
    """Several at a time."""
    options = overlap_options(torch.device("cuda", torch.cuda.current_device()))
    with ThreadPoolExecutor(12) as pool, triton.AsyncCompileMode(pool):
        for rows, num_out, size, gated, tuning, dtype, bias in kernels:
            kernel, constexprs, num_warps = few_rows_variant(rows, num_out, size, gated=gated, tuning=tuning)
            out = dtype if constexprs.get("SPLITS", 1) == 1 else torch.float32
            operands = (dtype, dtype, bias, out, num_out, rows)[: 5 if kernel is linear_sum_kernel else 6]
            kernel.warmup(*operands, grid=(1,), num_warps=num_warps, **constexprs, **options, **FUSED)


def time_product(name: str, shape: tuple[int, int], row_numbers: list[int]) -> Iterator[Row]:
    """Torch's product, ours, and ours in every tuning."""
    nbytes = 2 * shape[0] * shape[1]
    weights = [_random(*shape) for _ in range(max(2, -(-WEIGHTS_NBYTES // nbytes)))]
    for num_rows in row_numbers:
        x = _random(num_rows, shape[1])
        products: dict[str, Product] = {"torch": F.linear, "ours": linear}
        products |= {str(t): partial(linear_few_rows, bias=None, tuning=t) for t in tunings(num_rows)}
        for launch, product in products.items():
            try:
                us = 1e6 * time_calls([partial(product, x, weight) for weight in weights])
            except Exception as error:
                print(f"  {launch}: {type(error).__name__} {str(error)[:80]}")
                continue
            yield Row(name, num_rows, launch, us, nbytes / (us * 1e-6 * BANDWIDTH))


def layer_products() -> Iterator[tuple[str, Product, Product, Product]]:
    """Name, product, product with SwiGLU, and product that a norm reads: torch's and ours."""
    yield "torch", F.linear, lambda x, weight: swiglu(F.linear(x, weight)), F.linear
    yield "ours, SwiGLU behind", linear, lambda x, weight: swiglu(linear(x, weight)), linear
    yield "ours, no splits", linear, linear_swiglu, linear
    yield "ours", linear, linear_swiglu, linear_sums


def time_layer(config: ModelConfig, num_rows: int, product: Product, gated: Product, summed: Product) -> float:
    """Microseconds of a layer's norms, products and SwiGLU, without attention, over eight layers of weights."""
    shapes = [shape for name, shape in sizes(config).items() if name != "lm_head"]
    rows = [_random(num_rows, config.hidden_size), _random(num_rows, shapes[1][1]), _random(config.hidden_size)]
    weights = [[_random(*shape) for shape in shapes] for _ in range(8)]
    return 1e6 * time_calls([partial(run_layer, with_weights(product, gated, summed, each), rows) for each in weights])


def with_weights(product: Product, gated: Product, summed: Product, weights: Sequence[Any]) -> list[LayerProduct]:
    """The functions as the products of a layer, for ``run_layer``; norms read those of ``summed``."""
    functions = product, summed, gated, summed
    return [partial(function, weight=weight) for function, weight in zip(functions, weights, strict=True)]


def run_layer(products: Sequence[LayerProduct], rows: Sequence[Tensor]) -> None:
    """A layer's products and norms, from o to the next layer's first product.

    ``products``: the first one, o, gate and up with SwiGLU, down;  ``rows``: the residual, attention's result, a
    norm's weight.
    """
    (first, o, gate_up, down), (residual, attended, norm) = products, rows
    inner = gate_up(add_rms_norm(o(attended), residual, norm, 1e-6))
    first(add_rms_norm(down(inner), residual, norm, 1e-6))


def best(rows: list[Row], num_rows: int, layers: int) -> Iterator[tuple[float, str]]:
    """Microseconds of all of a model's products in each launch, the fastest first."""
    total: dict[str, list[float]] = {}
    for row in rows:
        if row.rows == num_rows:
            total.setdefault(row.launch, []).append(row.us * (1 if row.product == "lm_head" else layers))
    number = len({row.product for row in rows})
    yield from sorted((sum(us), launch) for launch, us in total.items() if len(us) == number)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config, row_numbers = config_from_hf(SHAPES[args.shape]), [int(n) for n in args.rows.split(",")]
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if args.check:
        compile_all(checked())
        result["errors"] = check()
        wrong = {name: error for name, error in result["errors"].items() if not error <= BOUND}
        worst = max(result["errors"].values())
        print(f"{len(result['errors'])} products, largest error {worst:.3f} of what is allowed")
        if wrong:
            raise SystemExit(f"wrong: {wrong}")
    if args.time:
        compile_all(timed(config, row_numbers))
        rows: list[Row] = []
        for name, shape in sizes(config).items():
            for row in time_product(name, shape, row_numbers):
                print(
                    f"{row.product:8} {row.rows:3} rows {row.us:8.2f} us  share {row.share:.3f}  {row.launch}",
                    flush=True,
                )
                rows.append(row)
        for n in row_numbers:
            print(f"\n{n} rows, all products of {args.shape}; paste the fastest of ours into TILES")
            for us, launch in best(rows, n, config.num_layers):
                print(f"{us:9.1f} us  {n}: {launch},")
            for name, *products in layer_products():
                us = result[f"layer, {n} rows, {name}"] = time_layer(config, n, *products)
                print(f"{us:9.2f} us  a layer without attention: {name}", flush=True)
        result["rows"] = [asdict(row) for row in rows]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
