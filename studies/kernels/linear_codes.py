"""Checks and times products with quantized weights on a GPU, beside bf16, and tries launch parameters.

python -m studies.kernels.linear_codes [--check] [--time] [--tune] [--shape qwen3-8b] [--rows 1,16,256] [--budget 240]

Lines of JSON; times are those of graph replays over copies of a weight that exceed L2. ``share`` is bytes of the
weight / (time * 4.3e12 B/s). The sums at the end are all products of a step, with the output embedding at 8 bits.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.linear import linear, linear_sums, linear_swiglu
from qkv_engine.kernels.linear.dequantize_kernel import dequantize
from qkv_engine.kernels.linear.float8 import Float8Tuning, scaled_product, scaled_tiles
from qkv_engine.kernels.linear.float8_rows import quantize_rows
from qkv_engine.kernels.linear.integer import linear_codes, linear_integer
from qkv_engine.kernels.linear.packed import PackedCodes
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES

from .bench_linear import run_layer, sizes, with_weights
from .code_checks import check, checks
from .code_compiling import KINDS, Wanted, checked, compile_all, timed
from .code_tunings import TUNED, AnyTuning, candidates
from .code_weights import GROUP, print_line, product_of, random_rows, timed_weight
from .timing import time_calls

WEIGHTS_NBYTES = 400 << 20  # of the copies of a weight, eight times the L2 cache
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)


def copies(make: Callable[[], Any], nbytes: int) -> list[Any]:
    return [make() for _ in range(max(2, -(-WEIGHTS_NBYTES // nbytes)))]


def nbytes_of(weight: Tensor | PackedCodes) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.codes.nbytes + weight.scales.nbytes


def ways(kind: str, x: Tensor, gated: bool) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Names of ways to multiply, and functions of ``x`` and a weight."""
    if kind == "bf16":
        yield "bf16", linear_swiglu if gated else linear
        return
    yield "ours", partial(product_of(kind), gated=gated)
    if len(x) >= 64 and kind != "float8":
        yield "tiles", partial(linear_codes, gated=gated)
        yield "written out", lambda x, weight: F.linear(x, dequantize(weight, x.dtype))
    if kind == "float8" and len(x) > 1:
        rows = quantize_rows(x)
        yield "weight only", partial(linear_integer, gated=gated)
        yield "float8 tiles of rows", lambda x, weight: scaled_tiles(rows, weight, gated=gated)
        yield "scaled_mm of rows", lambda x, weight: scaled_product(rows, weight)
        yield "rows", lambda x, weight: quantize_rows(x).codes


def time_all(shapes: dict[str, tuple[int, int]], row_numbers: list[int], layers: int) -> None:
    """Every product, and then the sums of a step."""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for kind in ("bf16", *KINDS):
        for name, (num_out, size) in shapes.items():
            make: Callable[[], Any] = partial(timed_weight, kind, num_out, size)
            if kind == "bf16":
                make = partial(random_rows, num_out, size)
            elif name == "lm_head" and kind == "int4":
                continue
            first = make()
            nbytes = nbytes_of(first)
            weights, gated = [first, *copies(make, nbytes)[1:]], name == "gate_up"
            for num_rows in row_numbers:
                if name == "lm_head" and num_rows > 256:
                    continue
                x = random_rows(num_rows, size)
                for way, product in ways(kind, x, gated):
                    fields = {"time": kind, "product": name, "rows": num_rows, "way": way}
                    try:
                        us = 1e6 * time_calls([partial(product, x, weight) for weight in weights])
                    except Exception as failure:
                        print_line(**fields, failed=f"{type(failure).__name__}: {failure}"[:300])
                        continue
                    print_line(**fields, us=us, share=nbytes / (us * 1e-6 * BANDWIDTH))
                    found.setdefault((kind, way, num_rows), {})[name] = us
            del weights, first
    for (kind, way, num_rows), times in found.items():
        layer = sum(us for name, us in times.items() if name != "lm_head")
        if len(times) < len(shapes) - 1:
            continue
        head = found.get((kind if kind != "int4" else "int8", "ours" if kind == "int4" else way, num_rows), {}).get(
            "lm_head", 0.0
        )
        print_line(
            sum=kind, way=way, rows=num_rows, layer_us=layer, head_us=head, step_ms=(layer * layers + head) / 1e3
        )


def time_layers(shapes: dict[str, tuple[int, int]], row_numbers: list[int]) -> None:
    """Layers without attention one after another, over several layers of weights."""
    layer_shapes = [shape for name, shape in shapes.items() if name != "lm_head"]
    hidden, heads = layer_shapes[0][1], layer_shapes[1][1]
    for kind in ("bf16", *KINDS):
        product: Callable[..., Tensor] = linear if kind == "bf16" else product_of(kind)
        gated = linear_swiglu if kind == "bf16" else partial(product, gated=True)
        summed = linear_sums if kind == "bf16" else product
        make = random_rows if kind == "bf16" else partial(timed_weight, kind)
        weights: list[Any] = [[make(*shape) for shape in layer_shapes] for _ in range(4 if kind == "bf16" else 8)]
        for num_rows in row_numbers:
            rows = [random_rows(num_rows, size) for size in (hidden, heads)]
            rows.append(random_rows(1, hidden)[0])
            try:
                us = 1e6 * time_calls(
                    [partial(run_layer, with_weights(product, gated, summed, each), rows) for each in weights]
                )
                print_line(layer=kind, rows=num_rows, us=us)
            except Exception as failure:
                print_line(layer=kind, rows=num_rows, failed=f"{type(failure).__name__}: {failure}"[:300])
        del weights


def tune(pool: Pool, shapes: dict[str, tuple[int, int]], budget: float) -> None:
    """The best launch parameters of each kind and number of rows, for a layer's products together and for each."""
    end = time.monotonic() + budget
    layer = {name: shape for name, shape in shapes.items() if name != "lm_head"}
    weights: dict[str, dict[str, list[PackedCodes]]] = {}
    for kind, num_rows in TUNED:
        if time.monotonic() > end:
            print_line(tune=kind, rows=num_rows, skipped="the budget is spent")
            continue
        form = kind.split()[0]
        if form not in weights:
            weights[form] = {
                n: copies(partial(timed_weight, form, *s), s[0] * s[1] // (2 if form == "int4" else 1))
                for n, s in (layer if form == "int4" else shapes).items()
            }
        tunings = candidates(kind, num_rows)
        name_of = f"int4/{GROUP}" if form == "int4" else form
        products = shapes if form != "int4" and num_rows in (1, 16, 256) else layer
        compile_all(
            pool, [Wanted(name_of, s, num_rows, n == "gate_up", t) for t in tunings for n, s in products.items()]
        )
        results: dict[AnyTuning, dict[str, float]] = {}
        for tuning in tunings:
            if time.monotonic() > end:
                break
            for name, (_, size) in products.items():
                x = random_rows(num_rows, size)
                if isinstance(tuning, Float8Tuning):
                    call: Any = partial(scaled_tiles, quantize_rows(x), gated=name == "gate_up", tuning=tuning)
                else:
                    call = partial(linear_codes, x, gated=name == "gate_up", tuning=tuning)
                try:
                    us = 1e6 * time_calls([partial(call, weight) for weight in weights[form][name]])
                except Exception as failure:
                    print_line(tune=kind, rows=num_rows, tuning=tuple(tuning), product=name, failed=str(failure)[:100])
                    continue
                results.setdefault(tuning, {})[name] = us
        whole = {t: sum(us[n] for n in layer) for t, us in results.items() if layer.keys() <= us.keys()}
        for tuning in sorted(whole, key=lambda t: whole[t])[:6]:
            parts = {n: round(t, 2) for n, t in results[tuning].items()}
            print_line(tune=kind, rows=num_rows, layer_us=whole[tuning], tuning=tuple(tuning), **parts)
        for name in products:
            best = min((t for t in results if name in results[t]), key=lambda t: results[t][name], default=None)
            if best is not None:
                print_line(tune=kind, rows=num_rows, product=name, us=results[best][name], tuning=tuple(best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of --tune")
    args = parser.parse_args()
    config, row_numbers = config_from_hf(SHAPES[args.shape]), [int(n) for n in args.rows.split(",")]
    shapes, started = sizes(config), time.monotonic()
    pool = get_context("fork").Pool(14)  # before this process has a CUDA context, which no child may inherit
    torch.set_default_device("cuda")
    print_line(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    if args.check or args.time:
        compile_all(pool, {**dict.fromkeys(timed(shapes, row_numbers)), **dict.fromkeys(checked(shapes))})
    wrong = 0
    for is_wanted, work in (
        (args.check, lambda: sum(map(check, checks(shapes)))),
        (args.time, lambda: time_all(shapes, row_numbers, config.num_layers)),
        (args.time, lambda: time_layers(shapes, row_numbers)),
        (args.tune, lambda: tune(pool, shapes, args.budget)),
    ):
        if is_wanted:
            try:
                wrong += work() or 0
            except Exception:
                traceback.print_exc()
                wrong += 1
            print_line(after_s=time.monotonic() - started)
    print_line(wrong=wrong)


if __name__ == "__main__":
    main()
