"""Checks and times the mixture of experts of one layer on a GPU, beside torch's grouped products.

python -m studies.kernels.bench_moe [--tokens 1,16,64,256] [--tune 1,16,64,256] [--seconds 90] [--json FILE]

The shape is that of Qwen3 30B-A3B. limit = max(bytes of the touched experts / bandwidth, operations / rate) of an
H200; share = limit / time of ``experts_mlp``. Calls run in a graph over copies of the weights, with a routing
of their own each. torch: its two grouped products and our SwiGLU between, tokens already sorted; "all" also sorts,
gathers and sums. Tunings are tried for each product alone, and the fastest are printed as lines to paste.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH, FLOPS
from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.moe import Experts, Routing, SoftmaxOver, SwiGLU, experts_mlp, reference, route
from qkv_engine.kernels.moe import triton as moe
from qkv_engine.kernels.moe.sum_kernel import down_sum_kernel, gate_up_sum_kernel
from qkv_engine.kernels.moe.tile_kernel import expert_tile_kernel
from qkv_engine.kernels.overlap import overlap_options
from qkv_engine.kernels.swiglu import swiglu

from .timing import time_us

SIZE, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
EXPERT_NBYTES = 3 * SIZE * INNER * 2
COPIES, ROUTINGS = 4, 2  # of the weights, 1.2 GB each; routings of each copy
SKEW = 1.5  # of logits that fall with the logarithm of an expert's rank
BOUND = 4e-3  # relative error
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, shift=1.0)
SUMS = [moe.Sum(*s) for s in product((512, 1024, 2048), (2, 4, 8), (8, 16, 24))]
TILES = {  # by tokens of a tile
    8: ((32, 256, 2, 3), (32, 256, 2, 5), (64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 4, 3)),
    16: ((32, 256, 2, 4), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3)),
    32: ((64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 4, 3), (128, 128, 8, 3)),
    64: ((128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (256, 64, 8, 4)),
    128: ((128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3)),
}
BLOCK_M = {
    2: (8,),
    4: (8,),
    8: (8,),
    16: (8, 16),
    32: (8, 16),
    64: (16, 32),
    128: (16, 32),
    256: (32, 64),
    1024: (64, 128),
}


class Layer(NamedTuple):
    """One call's operands."""

    x: Tensor
    routing: Routing
    experts: Experts


@dataclass(frozen=True)
class Row:
    """One measurement, in microseconds: the layer, its parts, torch's products, and all of torch's operators."""

    routing: str
    tokens: int
    touched: float
    limit: float
    us: float
    share: float
    parts: dict[str, float]
    torch: float | None
    torch_all: float | None


def make_weights() -> Experts:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

    return Experts(random(EXPERTS, 2 * INNER, SIZE), random(EXPERTS, SIZE, INNER))


def make_layers(weights: list[Experts], tokens: int, *, skewed: bool = False) -> list[Layer]:
    """Every copy of the weights with several routings."""
    found = []
    for experts in weights * ROUTINGS:
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        if skewed:
            logits -= SKEW * torch.arange(1, EXPERTS + 1, device="cuda").log()[torch.randperm(EXPERTS, device="cuda")]
        x = torch.randn(tokens, SIZE, device="cuda", dtype=torch.bfloat16)
        found.append(Layer(x, route(logits, TOP_K, SoftmaxOver.CHOSEN), experts))
    return found


def check(experts: Experts) -> dict[str, float]:
    """Relative errors; infinity where a second run differs."""
    found = {}
    bias = [torch.randn(EXPERTS, n, device="cuda", dtype=torch.bfloat16) for n in (2 * INNER, SIZE)]
    for tokens, is_gpt_oss in product((1, 2, 16, 64, 256, 1024), (False, True)):
        layer = make_layers([experts], tokens, skewed=is_gpt_oss)[0]
        if is_gpt_oss:
            layer = layer._replace(experts=Experts(experts.gate_up, experts.down, bias[0], bias[1], GPT_OSS))
        out, expected = experts_mlp(*layer), reference.experts_mlp(*layer).double()
        error = float((out.double() - expected).norm() / expected.norm())
        found[f"{tokens} tokens{', gpt-oss' * is_gpt_oss}"] = (
            error if torch.equal(out, experts_mlp(*layer)) else float("inf")
        )
    logits = torch.randn(1024, EXPERTS, device="cuda").bfloat16()  # with many ties
    for over in SoftmaxOver:
        ours, theirs = route(logits, TOP_K, over), reference.route(logits, TOP_K, over)
        is_same = torch.equal(ours.experts, theirs.experts)
        found[f"route {over.name}"] = float((ours.weights - theirs.weights).abs().max()) if is_same else float("inf")
    return found


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Torch's grouped product of sorted tokens."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def torch_products(sorted_x: Tensor, ends: Tensor, experts: Experts) -> Tensor:
    gate_up, down = experts.plain(sorted_x.dtype)
    return grouped(swiglu(grouped(sorted_x, gate_up, ends)), down, ends)


def sort_tokens(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    chosen = layer.routing.experts.flatten()
    order = chosen.argsort(stable=True)
    numbers = torch.arange(EXPERTS, device="cuda", dtype=torch.int32)
    ends = torch.searchsorted(chosen[order], numbers, right=True).int()
    return order, layer.x[order // TOP_K], ends


def torch_layer(layer: Layer) -> Tensor:
    """The whole layer in torch's operators."""
    order, sorted_x, ends = sort_tokens(layer)
    pairs = torch.empty_like(sorted_x).index_copy_(0, order, torch_products(sorted_x, ends, layer.experts))
    weighted = pairs.view(-1, TOP_K, SIZE).float() * layer.routing.weights[:, :, None]
    return weighted.sum(1).to(layer.x.dtype)


def sum_inners(layers: list[Layer], launch: moe.Sum) -> list[Tensor]:
    return [moe.gate_up_sums(*layer, launch) for layer in layers]


def time_parts(layers: list[Layer], tuning: moe.Tuning) -> dict[str, float]:
    """Each launch of a layer alone."""
    calls: dict[str, list[Callable[[], Any]]] = {}
    if isinstance(tuning, moe.ExpertSums):
        calls["gate_up"] = [partial(moe.gate_up_sums, *layer, tuning.gate_up) for layer in layers]
        inners = sum_inners(layers, tuning.gate_up)
        calls["down"] = [
            partial(moe.down_sums, inner, *layer[1:], tuning.down) for inner, layer in zip(inners, layers, strict=True)
        ]
    else:
        plans = [moe.sort_by_expert(layer.routing, EXPERTS, tuning.block_m) for layer in layers]
        calls["sort"] = [partial(moe.sort_by_expert, layer.routing, EXPERTS, tuning.block_m) for layer in layers]
        for name, _, made in tile_calls(layers, plans, tuning):
            calls[name] = made
        pairs = torch.randn(len(layers[0].x) * TOP_K, SIZE, device="cuda", dtype=torch.bfloat16)
        calls["combine"] = [partial(moe.combine, pairs, layer.routing) for layer in layers]
    return {name: us for name, made in calls.items() if (us := time_us(made, name)) is not None}


def tile_calls(
    layers: list[Layer], plans: list[moe.Plan], tuning: moe.ExpertTiles
) -> Iterator[tuple[str, moe.Tile, list[Callable[[], Any]]]]:
    """Both products: name, launch parameters and calls."""
    inner = torch.randn(layers[0].routing.experts.numel(), INNER, device="cuda", dtype=torch.bfloat16)
    pairs = list(zip(layers, plans, strict=True))
    yield "gate_up", tuning.gate_up, [partial(moe.gate_up_tiles, *layer, plan, tuning) for layer, plan in pairs]
    yield "down", tuning.down, [partial(moe.down_tiles, inner, *layer[1:], plan, tuning) for layer, plan in pairs]


def measure(name: str, layers: list[Layer], tuning: moe.Tuning | None = None) -> Row:
    """A layer's time, with ``tuning`` or as the engine launches it."""
    tokens = len(layers[0].x)
    tuning = tuning or moe.choose_tuning(tokens, TOP_K, EXPERTS)
    touched = sum(len(set(layer.routing.experts.flatten().tolist())) for layer in layers) / len(layers)
    limit = 1e6 * max(touched * EXPERT_NBYTES / BANDWIDTH, tokens * TOP_K * EXPERT_NBYTES / FLOPS)
    us = time_us([partial(moe.experts_mlp_triton, *layer, tuning=tuning) for layer in layers], "layer") or float("nan")
    presorted = [(*sort_tokens(layer)[1:], layer.experts) for layer in layers]
    theirs = time_us([partial(torch_products, *operands) for operands in presorted], "torch")
    theirs_all = time_us([partial(torch_layer, layer) for layer in layers], "torch, all")
    return Row(name, tokens, touched, limit, us, limit / us, time_parts(layers, tuning), theirs, theirs_all)


def compile_all(block_ms: set[int]) -> None:
    """Kernels that are checked, timed and tried for ``block_ms``, several at a time."""
    options, bf16 = overlap_options(torch.device("cuda", torch.cuda.current_device())), torch.bfloat16
    chosen = [tuning for tuning in moe.TUNINGS.values() if isinstance(tuning, moe.ExpertTiles)]
    tiles = {(block_m, moe.Tile(*shape), False) for block_m in block_ms for shape in TILES[block_m]}
    tiles |= {(t.block_m, tile, biased) for t in chosen for tile in t[1:] for biased in (False, True)}
    with ThreadPoolExecutor(14) as pool, triton.AsyncCompileMode(pool):
        for (block_m, tile, biased), gated in product(tiles, (False, True)):
            rows, columns = (2 * INNER, SIZE) if gated else (SIZE, INNER)
            activation = (GPT_OSS if biased else SwiGLU()) if gated else None
            constexprs, warps = moe.tile_variant(rows, columns, TOP_K, activation, block_m, tile)
            operands = bf16, bf16, bf16 if biased else None, bf16, torch.int32, torch.int32
            expert_tile_kernel.warmup(*operands, grid=(1,), num_warps=warps, **constexprs, **options, **FUSED)
        for launch in SUMS:
            constexprs, warps = moe.gate_up_sum_variant(SIZE, INNER, TOP_K, SwiGLU(), launch)
            gate_up = bf16, bf16, None, bf16, torch.int32
            gate_up_sum_kernel.warmup(*gate_up, grid=(1,), num_warps=warps, **constexprs, **options, **FUSED)
            constexprs, warps = moe.down_sum_variant(SIZE, INNER, TOP_K, launch)
            down = *gate_up, torch.float32
            down_sum_kernel.warmup(*down, grid=(1,), num_warps=warps, **constexprs, **options, **FUSED)


def tune(layers: list[Layer], deadline: float) -> Iterator[tuple[float, moe.Tuning]]:
    """The fastest launch parameters of either kind, by the time of both products alone."""
    tokens = len(layers[0].x)
    if tokens <= 4:
        yield from tune_sums(layers, deadline)
    for block_m in BLOCK_M.get(tokens, ()):
        plans = [moe.sort_by_expert(layer.routing, EXPERTS, block_m) for layer in layers]
        best: dict[str, tuple[float, moe.Tile]] = {}
        for shape in TILES[block_m]:
            if time.monotonic() > deadline:
                print("  out of time: the rest is left out")
                break
            tile = moe.Tile(*shape)
            for name, launch, calls in tile_calls(layers, plans, moe.ExpertTiles(block_m, tile, tile)):
                us = time_us(calls, f"{name} {launch}")
                if us is not None:
                    print(
                        f"  {tokens:5} tokens, tiles of {block_m:3}  {name:8} {us:8.2f} us  {tuple(launch)}", flush=True
                    )
                    best[name] = min(best.get(name, (us, launch)), (us, launch))
        if len(best) == 2:
            us = sum(part[0] for part in best.values())
            yield us, moe.ExpertTiles(block_m, best["gate_up"][1], best["down"][1])


def tune_sums(layers: list[Layer], deadline: float) -> Iterator[tuple[float, moe.Tuning]]:
    best: dict[str, tuple[float, moe.Sum]] = {}
    inners, seen = sum_inners(layers, SUMS[0]), set()
    for launch in SUMS:
        for name in ("gate_up", "down"):
            if name == "gate_up":
                blocks: Any = moe.gate_up_sum_variant(SIZE, INNER, TOP_K, SwiGLU(), launch)
                calls = [partial(moe.gate_up_sums, *layer, launch) for layer in layers]
            else:
                blocks = moe.down_sum_variant(SIZE, INNER, TOP_K, launch)
                pairs = zip(inners, layers, strict=True)
                calls = [partial(moe.down_sums, inner, *layer[1:], launch) for inner, layer in pairs]
            if (key := f"{name} {blocks}") in seen or time.monotonic() > deadline:
                continue
            seen.add(key)
            us = time_us(list(calls), f"{name} {launch}")
            if us is not None:
                print(f"  {len(layers[0].x):5} tokens, sums  {name:8} {us:8.2f} us  {tuple(launch)}", flush=True)
                best[name] = min(best.get(name, (us, launch)), (us, launch))
    if len(best) == 2:
        yield sum(part[0] for part in best.values()), moe.ExpertSums(best["gate_up"][1], best["down"][1])


def print_row(row: Row) -> None:
    parts = "  ".join(f"{name} {us:.1f}" for name, us in row.parts.items())
    theirs, theirs_all = (f"{us:8.1f}" if us is not None else "       -" for us in (row.torch, row.torch_all))
    tflops = 1e-6 * row.tokens * TOP_K * EXPERT_NBYTES / row.us
    print(
        f"{row.routing:8} {row.tokens:5} tokens {row.touched:6.1f} experts  limit {row.limit:7.1f} us  "
        f"ours {row.us:7.1f} us  share {row.share:.3f}  {tflops:6.1f} TFLOP/s  torch {theirs} us, "
        f"all {theirs_all} us  ({parts})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,1024")
    parser.add_argument("--tune", default="1,16,64,256,4,1024")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    torch.manual_seed(0)
    tuned = [int(tokens) for tokens in args.tune.split(",") if tokens]
    compile_all({block_m for tokens in tuned for block_m in BLOCK_M.get(tokens, ())})
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    weights = [make_weights() for _ in range(COPIES)]
    print(torch.cuda.get_device_name(), flush=True)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"triton": triton.__version__, "errors": check(weights[0])}
    wrong = {name: error for name, error in result["errors"].items() if not error <= BOUND}
    print(f"{len(result['errors'])} checks, largest error {max(result['errors'].values()):.2e}; wrong: {wrong or None}")
    if wrong:
        raise SystemExit("nothing is timed")
    rows = []
    for name, tokens in product(("random", "skewed"), map(int, args.tokens.split(","))):
        rows.append(measure(name, make_layers(weights, tokens, skewed=name == "skewed")))
        print_row(rows[-1])
    result["rows"] = [asdict(row) for row in rows]
    result["tunings"] = {}
    for tokens in tuned:
        layers = make_layers(weights, tokens)
        found = sorted(tune(layers, deadline), key=itemgetter(0))
        result["tunings"][tokens] = [(us, str(tuning)) for us, tuning in found]
        for us, tuning in found:
            print(f"{us:9.1f} us  {tokens * TOP_K / EXPERTS}: {tuning},", flush=True)
        if found:
            print_row(measure("tuned", layers, found[0][1]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
