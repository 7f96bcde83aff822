"""Launch parameters of products of few rows between their neighbours on a GPU, by coordinate descent.

python -m studies.kernels.layer_tiles [--layer qwen3-8b] [--kind int8] [--rows 16] [--rounds 2]

A layer's norms and products follow one another in a graph, over the weights of several layers. One product after the
other is tried in every tile and keeps the one with which the whole is shortest: launches overlap, so that a product
alone may be fastest in another tile. None is what the engine launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.linear.integer import linear_codes
from qkv_engine.kernels.linear.triton import linear_few_rows
from qkv_engine.kernels.rms_norm import add_rms_norm

from . import bench_linear, code_compiling
from .code_tunings import candidates
from .code_weights import GROUP, random_rows, timed_weight
from .timing import time_us

# Rows and columns of the weights, in their order. The first two and the last two have a norm before them.
LAYERS = {
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "qwen3.5-4b": {"in": (12352, 2560), "o": (2560, 4096), "gate_up": (18432, 2560), "down": (2560, 9216)},
}
Choice = dict[str, Any]  # launch parameters by product
Product = Callable[..., Tensor]


def descend(
    found: Choice, options: Sequence[Any], measure: Callable[[Choice], float | None], rounds: int
) -> Iterator[tuple[str, Choice, float]]:
    """The product last tried, the best choice so far and its time; None is a choice that fails, and is not taken."""
    best = measure(found) or float("inf")
    for product in [*found] * rounds:
        for option in options:
            tried = found | {product: option}
            us = measure(tried)
            if us is not None and us < best:
                best, found = us, tried
        yield product, found, best


def run_layer(product: Product, rows: Sequence[Tensor], weights: Mapping[str, Any], choice: Choice) -> None:
    """``rows``: the layer's input, the residual, what attention gives, and a norm's weight."""
    x, residual, attended, norm = rows
    first, o, gate_up, down = (
        partial(product, weight=weight, gated=name == "gate_up", tuning=choice[name])
        for name, weight in weights.items()
    )
    first(add_rms_norm(x, residual, norm, 1e-6))
    down(gate_up(add_rms_norm(o(attended), residual, norm, 1e-6)))


def compile_all(kind: str, shapes: Mapping[str, tuple[int, int]], num_rows: int, options: Sequence[Any]) -> None:
    """Every tile of every product, several at a time."""
    wanted = [(shape, name == "gate_up", tuning) for name, shape in shapes.items() for tuning in (None, *options)]
    if kind == "bf16":
        bench_linear.compile_all(bench_linear.Wanted(num_rows, *shape, *others) for shape, *others in wanted)
        return
    form = f"int4/{GROUP}" if kind == "int4" else kind
    with get_context("fork").Pool(14) as pool:  # before this process has a CUDA context, which no child may inherit
        code_compiling.compile_all(pool, [code_compiling.Wanted(form, of[0], num_rows, *of[1:]) for of in wanted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, default="qwen3-8b")
    parser.add_argument("--kind", choices=("bf16", "int4", "int8"), default="int8")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    is_plain, shapes = args.kind == "bf16", LAYERS[args.layer]
    options = bench_linear.tunings(args.rows) if is_plain else candidates(args.kind, args.rows)
    compile_all(args.kind, shapes, args.rows, options)
    torch.set_default_device("cuda")
    make = random_rows if is_plain else partial(timed_weight, args.kind)
    layers = [{name: make(*shape) for name, shape in shapes.items()} for _ in range(4 if is_plain else 8)]
    size, attended = next(iter(shapes.values()))[1], shapes["o"][1]
    rows = [*(random_rows(args.rows, each) for each in (size, size, attended)), random_rows(1, size)[0]]
    product: Product = linear_few_rows if is_plain else linear_codes

    def measure(choice: Choice) -> float | None:
        return time_us([partial(run_layer, product, rows, weights, choice) for weights in layers], str(choice))

    launched: Choice = dict.fromkeys(shapes)
    print(f"as launched: {measure(launched)} us")
    for name, choice, us in descend(launched, options, measure, args.rounds):
        print(f"{us:9.2f} us  {name}: {choice[name]}", flush=True)


if __name__ == "__main__":
    main()
