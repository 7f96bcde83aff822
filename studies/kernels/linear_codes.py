"""Checks and times products with quantized weights on a GPU, beside bf16, and tries launch parameters.

python -m studies.kernels.linear_codes [--check] [--time] [--tune] [--shape qwen3-8b] [--rows 1,16,256] [--budget 240]

Lines of JSON; times are those of graph replays over copies of a weight that exceed L2. ``share`` is bytes of the
weight / (time * 4.3e12 B/s). The sums at the end are all products of a step, with the output embedding at 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.linear import codes_reference, linear, linear_swiglu
from qkv_engine.kernels.linear.code_sum import code_sum_kernel
from qkv_engine.kernels.linear.codes import Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.dequantize import dequantize
from qkv_engine.kernels.linear.float8 import (
    MIN_ROWS,
    Float8Tuning,
    can_scale,
    linear_float8,
    scaled_product,
    scaled_tiles,
    scaled_variant,
)
from qkv_engine.kernels.linear.float8_rows import norm_rows, quantize_rows
from qkv_engine.kernels.linear.float8_tile import float8_tile_kernel
from qkv_engine.kernels.linear.integer import (
    MAX_TILE_ROWS,
    code_variant,
    linear_codes,
    linear_integer,
)
from qkv_engine.kernels.linear.packed import PackedCodes, pack
from qkv_engine.kernels.overlap import overlap_options
from qkv_engine.kernels.rms_norm import add_rms_norm
from qkv_engine.kernels.swiglu import swiglu
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES

from .bench_linear import sizes
from .code_tunings import TUNED, AnyTuning, candidates
from .timing import time_calls

WEIGHTS_NBYTES = 400 << 20  # of the copies of a weight, eight times the L2 cache
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
KINDS = ("int4", "int8", "float8")
GROUP = 128  # of 4 bits; the others have a scale a channel
MAX_ERROR = 4e-3  # of ||out||: a rounding to bf16 is 1e-3
MAX_FLOAT8_ERROR = 5e-2  # with activations of 8 bits
FORMATS = (
    "int4/32",
    "int4/128 zeros",
    "int4/128 order",
    "int4/channel",
    "int8/128",
    "int8/channel",
    "float8",
    "float8 blocks",
)


def print_line(**fields: Any) -> None:
    """One line of JSON; floats to five digits."""
    print(json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def random_weight(
    kind: str, num_out: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> IntegerWeight | Float8Weight:
    """Random codes on the GPU; ``kind``: "int4/128 zeros" and the like."""
    name, *options = kind.split()
    name, _, group = name.partition("/")
    if name == "float8":
        codes = torch.randn(num_out, size, dtype=torch.float16).mul_(100).clamp_(-448, 448)
        blocks = (-(-num_out // 128), -(-size // 128)) if options else (num_out, 1)
        return Float8Weight(codes.to(torch.float8_e4m3fn), torch.rand(blocks) / 1000 + 1e-4)
    columns = size if group in ("", "channel") else int(group)
    scales = (torch.rand(num_out, size // columns) / 100 + 1e-3).to(dtype)
    if name == "int8":
        return IntegerWeight(torch.randint(-128, 128, (num_out, size), dtype=torch.int8), scales)
    codes = torch.randint(0, 256, (num_out, size // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if options else None
    order = torch.randperm(size, dtype=torch.int32) if options == ["order"] else None
    return IntegerWeight(codes, scales, zeros, order)


def timed_weight(kind: str, num_out: int, size: int) -> PackedCodes:
    """As it is timed: 4 bits in groups."""
    return pack(random_weight(f"{kind}/{GROUP}" if kind == "int4" else kind, num_out, size))


def random_rows(num_rows: int, size: int) -> Tensor:
    """In bf16 on the GPU."""
    return torch.randn(num_rows, size, dtype=torch.bfloat16)


def product_of(kind: str) -> Callable[..., Tensor]:
    return linear_float8 if kind.startswith("float8") else linear_integer


def relative_error(out: Tensor, x: Tensor, weight: IntegerWeight | Float8Weight, bias: Tensor | None) -> float:
    """||out - exact|| / ||exact||."""
    exact = F.linear(x.float(), codes_reference.dequantize(weight), None if bias is None else bias.float())
    return float((out.float() - exact).norm() / exact.norm())


class Check(NamedTuple):
    """Products to check: formats, shapes of weights, numbers of rows and dtype."""

    formats: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    row_numbers: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def cases(self) -> Iterator[tuple[str, tuple[int, int]]]:
        yield from itertools.product(self.formats, self.shapes)


def checks(shapes: dict[str, tuple[int, int]]) -> list[Check]:
    """Every format at an odd shape, and the real shapes."""
    some, real = ("int4/128 zeros", "int8/128", "float8"), tuple(shapes[name] for name in ("o", "gate_up", "down"))
    return [
        Check(FORMATS, ((1000, 1152),), (1, 5, 16, 31, 100, 256, 600)),
        Check(some, ((1000, 1152),), (1, 16, 100), torch.float16),
        Check(("int4/32", "int8", "float8"), ((74, 96),), (1, 3, 33)),
        Check(("int4/128", "int8", "float8"), real, (1, 16, 256)),
        Check(("float8 blocks",), (shapes["o"],), (64, 100, 600)),
    ]


def check(work: Check) -> int:
    """The number of wrong results. A NaN, other bits in a second run or another SwiGLU are wrong."""
    wrong = 0
    for kind, (num_out, size) in work.cases():
        weight = random_weight(kind, num_out, size, work.dtype)
        packed, bias = pack(weight), torch.randn(num_out).to(work.dtype)
        for num_rows in work.row_numbers:
            x = torch.randn(num_rows, size).to(work.dtype)
            fields = {"check": kind, "rows": num_rows, "shape": [num_out, size], "dtype": str(work.dtype)[6:]}
            try:
                out = product_of(kind)(x, packed, bias)
                error = relative_error(out, x, weight, bias)
                gated = product_of(kind)(x, packed, bias, gated=True)
                expected = swiglu(out).float()  # sums of columns may be added in another order
                is_same = torch.equal(out, product_of(kind)(x, packed, bias))
                is_same &= float((gated.float() - expected).norm() / expected.norm()) <= MAX_ERROR
                is_quantized = kind.startswith("float8") and can_scale(x, packed)
                is_right = error <= (MAX_FLOAT8_ERROR if is_quantized else MAX_ERROR) and is_same
                if not is_right or num_rows in (1, 600):
                    print_line(**fields, error=error, same=is_same, right=is_right)
            except Exception as failure:
                is_right = False
                print_line(**fields, failed=f"{type(failure).__name__}: {failure}"[:300])
            wrong += not is_right
    return wrong


class Wanted(NamedTuple):
    """One kernel to compile; with a bias where the dtype is said."""

    kind: str
    shape: tuple[int, int]
    num_rows: int
    gated: bool
    tuning: AnyTuning | None = None
    dtype: torch.dtype | None = None


def compile_kernel(wanted: Wanted) -> str | None:
    """Compiles into Triton's cache, which processes share; what went wrong."""
    kind, shape, num_rows, gated, tuning, dtype = wanted
    try:
        with torch.device("meta"):
            weight = pack(random_weight(kind, *shape, dtype or torch.bfloat16))
        if isinstance(tuning, Float8Tuning) or (kind == "float8" and tuning is None and num_rows >= MIN_ROWS):
            compile_float8(wanted, weight)
            return None
        kernel, constexprs, launch = code_variant(weight, num_rows, gated=gated, tuning=tuning)
        options = overlap_options(torch.device("cuda", 0)) | FUSED | launch
        bias, dtype, zeros = dtype, dtype or torch.bfloat16, None if weight.zeros is None else torch.uint8
        out = dtype if constexprs.get("SPLITS", 1) == 1 else torch.float32
        operands = weight.scales.dtype, zeros, bias, out, shape[0]
        rows = () if kernel is code_sum_kernel else (num_rows,)
        codes = torch.uint8 if rows else torch.int32
        kernel.warmup(dtype, codes, *operands, *rows, grid=(1, 1), **constexprs | {"ASM": True}, **options)
    except Exception as error:
        return f"{wanted}: {type(error).__name__}: {error}"[:300]
    return None


def compile_float8(wanted: Wanted, weight: PackedCodes) -> None:
    """Of products of 8-bit floats."""
    _, shape, num_rows, gated, tuning, bias = wanted
    assert tuning is None or isinstance(tuning, Float8Tuning)
    constexprs, num_warps = scaled_variant(weight, num_rows, gated=gated, tuning=tuning)
    out = torch.bfloat16 if constexprs["SPLITS"] == 1 else torch.float32
    operands = torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn, torch.float32, bias, out, shape[0], num_rows
    options = overlap_options(torch.device("cuda", 0)) | FUSED | {"num_warps": num_warps}
    float8_tile_kernel.warmup(*operands, grid=(1, 1), **constexprs, **options)


def timed(shapes: dict[str, tuple[int, int]], row_numbers: list[int]) -> Iterator[Wanted]:
    """Kernels that are timed."""
    for kind, (name, shape), num_rows in itertools.product(KINDS, shapes.items(), row_numbers):
        if num_rows <= MAX_TILE_ROWS and (kind, name) != ("int4", "lm_head"):
            yield Wanted(f"int4/{GROUP}" if kind == "int4" else kind, shape, num_rows, name == "gate_up")


def checked(shapes: dict[str, tuple[int, int]]) -> Iterator[Wanted]:
    """Kernels that are checked."""
    for work in checks(shapes):
        for (kind, shape), num_rows, gated in itertools.product(work.cases(), work.row_numbers, (False, True)):
            if num_rows <= MAX_TILE_ROWS:
                yield Wanted(kind, shape, num_rows, gated, None, work.dtype)


def compile_all(pool: Pool, kernels: Iterable[Wanted]) -> None:
    """Several at a time; those that fail are named, and do so again when they are launched."""
    start, wanted = time.monotonic(), list(kernels)
    failed = [error for error in pool.map(compile_kernel, wanted, chunksize=1) if error]
    print_line(compiled=len(wanted), seconds=time.monotonic() - start, failed=failed[:4])


def copies(make: Callable[[], Any], nbytes: int) -> list[Any]:
    return [make() for _ in range(max(2, -(-WEIGHTS_NBYTES // nbytes)))]


def nbytes_of(weight: Tensor | PackedCodes) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.codes.nbytes + weight.scales.nbytes


def ways(kind: str, num_rows: int, gated: bool) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Names of ways to multiply, and functions of ``x`` and a weight."""
    if kind == "bf16":
        yield "bf16", linear_swiglu if gated else linear
        return
    yield "ours", partial(product_of(kind), gated=gated)
    if num_rows >= 64 and kind != "float8":
        yield "tiles", partial(linear_codes, gated=gated)
        yield "written out", lambda x, weight: F.linear(x, dequantize(weight, x.dtype))
    if kind == "float8" and num_rows >= 8:
        yield "float8 tiles", lambda x, weight: scaled_tiles(quantize_rows(x), weight, gated=gated)
        yield "scaled_mm", lambda x, weight: scaled_product(quantize_rows(x), weight)


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
                for way, product in ways(kind, num_rows, gated):
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


def run_layer(
    product: Callable[..., Tensor], gated: Callable[..., Tensor], rows: list[Tensor], weights: list[Any]
) -> None:
    """A layer's norms and products; ``rows``: x, the residual, attention's result, a norm's weight."""
    x, residual, attended, norm = rows
    qkv, o, gate_up, down = weights
    product(add_rms_norm(x, residual, norm, 1e-6), qkv)
    product(gated(add_rms_norm(product(attended, o), residual, norm, 1e-6), gate_up), down)


def run_float8_layer(rows: list[Tensor], weights: list[PackedCodes]) -> None:
    """``run_layer`` of many rows, which norms and SwiGLU quantize."""
    x, residual, attended, norm = rows
    qkv, o, gate_up, down = weights
    scaled_product(norm_rows(x, residual, norm, 1e-6), qkv)
    hidden = scaled_product(quantize_rows(attended), o)
    gate_up_rows = scaled_product(norm_rows(hidden, residual, norm, 1e-6), gate_up)
    scaled_product(quantize_rows(gate_up_rows, gated=True), down)


def time_layers(shapes: dict[str, tuple[int, int]], row_numbers: list[int]) -> None:
    """Layers without attention one after another, over several layers of weights."""
    layer_shapes = [shape for name, shape in shapes.items() if name != "lm_head"]
    hidden, heads = layer_shapes[0][1], layer_shapes[1][1]
    for kind in ("bf16", *KINDS):
        product: Callable[..., Tensor] = linear if kind == "bf16" else product_of(kind)
        gated = linear_swiglu if kind == "bf16" else partial(product, gated=True)
        make = random_rows if kind == "bf16" else partial(timed_weight, kind)
        weights: list[Any] = [[make(*shape) for shape in layer_shapes] for _ in range(4 if kind == "bf16" else 8)]
        for num_rows in row_numbers:
            rows = [random_rows(num_rows, size) for size in (hidden, hidden, heads)]
            rows.append(random_rows(1, hidden)[0])
            forms: dict[str, Callable[..., None]] = {kind: partial(run_layer, product, gated, rows)}
            if kind == "float8" and num_rows >= MIN_ROWS:
                forms["float8 fused"] = partial(run_float8_layer, rows)
            for form, run in forms.items():
                try:
                    us = 1e6 * time_calls([partial(run, of_layer) for of_layer in weights])
                    print_line(layer=form, rows=num_rows, us=us)
                except Exception as failure:
                    print_line(layer=form, rows=num_rows, failed=f"{type(failure).__name__}: {failure}"[:300])
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
