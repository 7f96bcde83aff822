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

from qkv_engine.kernels.linear import linear, linear_sums, linear_swiglu
from qkv_engine.kernels.linear.integer import linear_codes
from qkv_engine.kernels.linear.packed import PackedCodes
from qkv_engine.kernels.linear.triton import SPLIT_TILES, TileTuning, linear_few_rows, linear_splits

from . import bench_linear, code_compiling
from .bench_linear import LayerProduct, run_layer
from .bench_tiles import WEIGHTS
from .code_tunings import candidates
from .code_weights import GROUP, random_rows, timed_weight
from .timing import time_us

LAYERS = {  # their products in order; the first and that of gate and up have a norm before them
    "qwen3-8b": ("8b qkv", "8b o", "8b gate_up", "8b down"),
    "qwen3.5-4b": ("4b in", "4b o", "4b gate_up", "4b down"),
}
Choice = dict[str, Any]  # launch parameters by product


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


def is_gated(name: str) -> bool:
    """Whether SwiGLU is in the product."""
    return name.endswith("gate_up")


def is_summed(name: str) -> bool:
    """Whether a norm reads the product, and adds up its splits."""
    return name.endswith((" o", "down"))


def has_splits(tuning: Any) -> bool:
    """Whether the product is left in splits."""
    return isinstance(tuning, TileTuning) and tuning.splits > 1


def split_tiles(num_rows: int) -> Iterator[TileTuning]:
    """Tiles in splits to try, for the products that norms read; for others they fail."""
    for block_m in [most for most in SPLIT_TILES if num_rows <= most][:1]:
        for splits in (2, 3, 4):
            yield from (TileTuning(block_m, 64, 128, 4, stages, splits) for stages in (3, 4, 5, 6))


def is_tried(name: str, size: int, tuning: Any) -> bool:
    """Whether a product over ``size`` columns may be launched so: a norm adds its splits, whose steps are whole."""
    return not has_splits(tuning) or (is_summed(name) and size % (tuning.splits * tuning.block_k) == 0)


def plain_product(name: str, weight: Tensor, tuning: Any) -> LayerProduct:
    """The product of that name with a weight of 16 bits."""
    if tuning is None:
        launch = linear_swiglu if is_gated(name) else linear_sums if is_summed(name) else linear
        return partial(launch, weight=weight)
    if has_splits(tuning):
        return partial(linear_splits, weight=weight, tuning=tuning)
    return partial(linear_few_rows, weight=weight, gated=is_gated(name), tuning=tuning)


def codes_product(name: str, weight: PackedCodes, tuning: Any) -> LayerProduct:
    """The same with a quantized weight."""
    return partial(linear_codes, weight=weight, gated=is_gated(name), tuning=tuning)


def compile_all(kind: str, shapes: Mapping[str, tuple[int, int]], num_rows: int, options: Sequence[Any]) -> None:
    """Every tile of every product, several at a time."""
    wanted = [
        (shape, is_gated(name), tuning)
        for name, shape in shapes.items()
        for tuning in (None, *options)
        if is_tried(name, shape[1], tuning)
    ]
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
    is_plain, shapes = args.kind == "bf16", {name: WEIGHTS[name] for name in LAYERS[args.layer]}
    plain = *bench_linear.tunings(args.rows), *split_tiles(args.rows)
    options: Sequence[Any] = plain if is_plain else candidates(args.kind, args.rows)
    compile_all(args.kind, shapes, args.rows, options)
    torch.set_default_device("cuda")
    make = random_rows if is_plain else partial(timed_weight, args.kind)
    layers = [{name: make(*shape) for name, shape in shapes.items()} for _ in range(4 if is_plain else 8)]
    (_, size), (_, attended), *_ = shapes.values()
    rows = [*(random_rows(args.rows, each) for each in (size, attended)), random_rows(1, size)[0]]
    product: Callable[..., LayerProduct] = plain_product if is_plain else codes_product

    def measure(choice: Choice) -> float | None:
        calls = []
        for weights in layers:
            products = [product(name, weight, choice[name]) for name, weight in weights.items()]
            calls.append(partial(run_layer, products, rows))
        return time_us(calls, str(choice))

    launched: Choice = dict.fromkeys(shapes)
    print(f"as launched: {measure(launched)} us")
    for name, choice, us in descend(launched, options, measure, args.rounds):
        print(f"{us:9.2f} us  {name}: {choice[name]}", flush=True)


if __name__ == "__main__":
    main()
