"""Checks and times experts with quantized weights on a GPU, beside plain ones.

python -m studies.kernels.bench_moe_codes [--kinds bf16,int4,int8,float8,float8 blocks,float4] [--shapes SHAPES]
    [--tokens 1,4,16,64,256,2048] [--tune] [--seconds 150] [--json FILE]

Shapes are those of Qwen3 30B-A3B and gpt-oss 20B; 4-bit integers have groups of 128 columns, or of 64 where 128 do not
divide a row. limit = max(bytes of the touched experts / bandwidth, operations / rate) of an H200; share = limit / time
of ``experts_mlp``, which is timed in a graph over copies of the weights with routings of their own; gate_up and down
are each product alone. The error is that of the first call against the reference, of the norm; a NaN, or other bits in
a second call, are infinity. --tune tries launch parameters of each product alone, int4 and int8 in the first shape and
float4 in the last, and prints the fastest as lines to paste. On 16 cores compilation takes about 40 seconds with --tune
and 15 without, measurements as long; launch parameters for which --seconds leaves no time are left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import triton

from qkv_engine.bench.roofline import BANDWIDTH, FLOPS
from qkv_engine.kernels.moe import Experts, experts_mlp, reference
from qkv_engine.kernels.moe import triton as moe
from qkv_engine.kernels.moe.codes import (
    CodeTile,
    SortedTiles,
    Tuning,
    choose_tuning,
    down_codes,
    experts_mlp_codes,
    gate_up_codes,
)

from .moe_codes import (
    BF16,
    FOUR_BITS,
    SHAPES,
    Layer,
    Shape,
    candidates,
    compile_one,
    expert_nbytes,
    fits,
    launched,
    make_experts,
    make_layers,
    tried,
    tuning_of,
)
from .timing import time_us

COPIES, ROUTINGS = 3, 2  # of the weights, which exceed L2; routings of each copy
BOUND = 5e-3  # relative error
BOUNDS = {"int4": 1e-2}  # of kinds whose elements large tiles round once they are scaled, which makes 5e-3
TUNED = {"float4": "gpt-oss-20b", "int4": "qwen3-30b-a3b", "int8": "qwen3-30b-a3b"}  # and the shape in which
PROCESSES = 14  # that compile


def error_of(layer: Layer, plain: Experts) -> float:
    """The relative error; infinity where a second call differs."""
    out, expected = experts_mlp(*layer), reference.experts_mlp(*layer[:2], plain).double()
    error = float((out.double() - expected).norm() / expected.norm())
    return error if torch.equal(out, experts_mlp(*layer)) and error == error else float("inf")


def products(layers: list[Layer], tuning: Tuning) -> dict[str, list[Callable[[], Any]]]:
    """Calls of either product alone."""
    inner = torch.randn(layers[0].routing.experts.numel(), layers[0].experts.down.shape[2], dtype=BF16)
    plans: list[moe.Plan | None] = [None] * len(layers)
    if isinstance(tuning, SortedTiles):
        num = layers[0].experts.num_experts
        plans = [moe.sort_by_expert(layer.routing, num, tuning.block_m) for layer in layers]
    pairs = list(zip(layers, plans, strict=True))
    return {
        "gate_up": [partial(gate_up_codes, *layer, plan, tuning) for layer, plan in pairs],
        "down": [partial(down_codes, inner, *layer[1:], plan, tuning) for layer, plan in pairs],
    }


def measure(name: str, shape: Shape, kind: str, tokens: int, layers: list[Layer], plain: Experts) -> dict[str, Any]:
    """A layer's error and time as the engine launches it."""
    nbytes = expert_nbytes(layers[0].experts)
    touched = sum(len(set(layer.routing.experts.flatten().tolist())) for layer in layers) / len(layers)
    work = tokens * shape.top_k * 6 * shape.size * shape.inner
    limit = 1e6 * max(touched * nbytes / BANDWIDTH, work / FLOPS)
    us = time_us([partial(experts_mlp, *layer) for layer in layers], "layer")
    row: dict[str, Any] = {"shape": name, "kind": kind, "tokens": tokens, "touched": touched, "limit": limit}
    row |= {"us": us, "share": us and limit / us, "error": error_of(layers[0], plain)}
    if kind != "bf16":
        chosen = choose_tuning(tokens, shape.top_k, shape.num, 4 if kind in FOUR_BITS else 8)
        row |= {part: time_us(calls, part) for part, calls in products(layers, chosen).items()}
    return row


def is_right(row: dict[str, Any]) -> bool:
    """Whether the error is within the bound of the kind; one that is no number is not."""
    return bool(row["error"] <= BOUNDS.get(row["kind"], BOUND))


def print_row(row: dict[str, Any]) -> None:
    """A line, and whether the result is right."""
    parts = "  ".join(f"{part} {row[part]:8.1f}" for part in ("gate_up", "down") if row.get(part))
    wrong = "" if is_right(row) else "  WRONG"
    us = f"{row['us']:8.1f} us  share {row['share']:.3f}" if row["us"] else "failed"
    print(
        f"{row['shape']:14} {row['kind']:13} {row['tokens']:5} tokens {row['touched']:6.1f} experts  "
        f"limit {row['limit']:7.1f}  {us}  error {row['error']:.1e}  {parts}{wrong}",
        flush=True,
    )


def block_ms(shape: Shape, tokens: int) -> set[int]:
    """Tokens of a tile to try, 0 for pairs: about as many as an expert has."""
    share = tokens * shape.top_k / shape.num
    if tokens == 1:
        return {0}
    if share <= 1:
        return {0, 8}
    most = 8 if share <= 2 else 16 if share <= 8 else 32 if share <= 24 else 64 if share <= 64 else 128
    return {most, max(8, most // 2)}


def tune(kind: str, shape: Shape, weights: list[Experts], tokens: int, deadline: float) -> Iterator[str]:
    """The fastest launch parameters of each product, as lines to paste."""
    layers = make_layers(shape, weights, tokens, ROUTINGS)
    found = []
    for block_m in sorted(block_ms(shape, tokens)):
        best: dict[str, tuple[float, CodeTile]] = {}
        for tile in candidates(kind, block_m):
            if time.monotonic() > deadline:
                yield f"  {kind} {tokens} tokens: out of time, the rest is left out"
                break
            for part, calls in products(layers, tuning_of(block_m, tile, tile)).items():
                us = time_us(calls, f"{part} {tile}")
                if us is not None:
                    print(f"  {kind:7} {tokens:5} tokens, tiles of {block_m:3}  {part:8} {us:8.2f} us  {tuple(tile)}")
                    best[part] = min(best.get(part, (us, tile)), (us, tile))
        if len(best) == 2:
            tuning = tuning_of(block_m, best["gate_up"][1], best["down"][1])
            us = time_us([partial(experts_mlp_codes, *layer, tuning=tuning) for layer in layers], "layer")
            if us is not None:
                found.append((us, tuning))
    for us, tuning in sorted(found, key=itemgetter(0)):
        yield f"{us:9.1f} us  {kind} {tokens * shape.top_k / shape.num}: {tuning},"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="bf16,int4,int8,float8,float8 blocks,float4")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256,2048")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    kinds, names = args.kinds.split(","), args.shapes.split(",")
    tokens = [int(number) for number in args.tokens.split(",")]
    cases = [(name, kind) for name, kind in product(names, kinds) if fits(kind, SHAPES[name])]
    tuned = [(name, kind) for kind, name in TUNED.items() if args.tune and (name, kind) in cases]
    wanted = [job for name, kind in cases for job in launched(kind, SHAPES[name], tokens)]
    for (name, kind), number in product(tuned, tokens):
        wanted += tried(kind, SHAPES[name], number, block_ms(SHAPES[name], number))
    wanted = list(dict.fromkeys(wanted))
    pool = get_context("fork").Pool(PROCESSES)  # before this process has a CUDA context, which no child may inherit
    failed = [error for error in pool.map(compile_one, wanted, chunksize=1) if error]
    pool.terminate()
    print(f"{len(wanted)} launches compiled, {deadline - time.monotonic():.0f} s left; failed: {failed}")
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "rows": []}
    for name, kind in cases:
        shape, weights = SHAPES[name], [make_experts(kind, SHAPES[name]) for _ in range(COPIES)]
        gate_up, down = weights[0].plain(torch.float32)
        plain = weights[0]._replace(gate_up=gate_up, down=down)
        for number in tokens:
            layers = make_layers(shape, weights, number, ROUTINGS)
            result["rows"].append(measure(name, shape, kind, number, layers, plain))
            print_row(result["rows"][-1])
        del layers, weights, gate_up, down, plain
    made = {kind: [make_experts(kind, SHAPES[name]) for _ in range(COPIES)] for name, kind in tuned}
    lines = []
    for number, (name, kind) in product(tokens, tuned):
        for line in tune(kind, SHAPES[name], made[kind], number, deadline):
            lines.append(line)
            print(line, flush=True)
    result["tunings"] = lines
    print(*lines, sep="\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    wrong = [row for row in result["rows"] if not is_right(row)]
    raise SystemExit(f"{len(wrong)} wrong" if wrong else 0)


if __name__ == "__main__":
    main()
