"""Checks and times products with quantized weights of humming-kernels on a GPU, beside ours and torch's in bf16.

python -m studies.kernels.bench_humming [--shape qwen3-8b] [--rows 16,256,1] [--forms W4A16,W8A16] [--budget 130]

Needs the package ``humming-kernels``, which compiles each kernel when it is first used: its parameters are those that
it chooses itself for the number of rows. Times are those of graph replays over copies of a weight that exceed L2, with
what turns activations into 8 bits, and with SwiGLU behind gate and up. Lines of JSON, then a table: us of a layer.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qkv_engine.kernels.linear import linear, linear_swiglu
from qkv_engine.kernels.linear.codes import Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.swiglu import swiglu
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES

from .bench_linear import sizes
from .code_checks import MAX_ERROR, MAX_FLOAT8_ERROR, relative_error
from .code_compiling import compile_all, timed
from .code_weights import GROUP, print_line, product_of, random_rows, random_weight
from .linear_codes import WEIGHTS_NBYTES
from .timing import time_calls

PROCESSES = 14
ROWS = (16, 256, 1, 64, 4, 2048)  # what tells most comes first, should the time run out


class Form(NamedTuple):
    """A form of weights and activations, by humming's names of their types.

    ``kind``: ours of the weights. ``spares_least``: no code is the least, so that humming may take sign and magnitude.
    """

    kind: str
    codes: str
    activations: str = "bfloat16"
    spares_least: bool = False


FORMS = {
    "W4A16": Form("int4", "uint4"),
    "W8A16": Form("int8", "uint8"),
    "W8A8-float8": Form("float8", "float8e4m3", "float8e4m3"),
    "W4A16-from-7": Form("int4", "uint4", spares_least=True),
    "W4A8-float8": Form("int4", "uint4", "float8e4m3"),
    "W4A8-int8": Form("int4", "uint4", "int8"),
    "W8A8-int8": Form("int8", "uint8", "int8"),
    "W8A16-float8": Form("float8", "float8e4m3"),
}


class Prepared(NamedTuple):
    """A weight as humming multiplies it: its description, its tensors, and the locks of sums over programs."""

    config: Any
    tensors: dict[str, Tensor]
    locks: Tensor


class Times:
    """Microseconds by way, number of rows and product; a way with a wrong or missing product has no sum."""

    def __init__(self, products: Sequence[str]) -> None:
        self.products = products
        self._us: dict[str, dict[int, dict[str, float]]] = {}

    def add(self, way: str, num_rows: int, product: str, calls: Sequence[Callable[[], Any]], **fields: Any) -> None:
        """Times ``calls``, and prints the time or why there is none."""
        fields = {"way": way, "rows": num_rows, "product": product, **fields}
        try:
            us = 1e6 * time_calls(calls)
        except Exception as failure:
            print_line(**fields, failed=f"{type(failure).__name__}: {failure}"[:300])
            return
        print_line(**fields, us=us)
        self._us.setdefault(way, {}).setdefault(num_rows, {})[product] = us

    def has(self, way: str) -> bool:
        return way in self._us

    def print_table(self, row_numbers: Sequence[int]) -> None:
        """Microseconds of a layer's products."""
        print("\n| rows | " + " | ".join(self._us) + " |\n" + "|---" * (len(self._us) + 1) + "|")
        for num_rows in sorted(row_numbers):
            found = (times.get(num_rows, {}) for times in self._us.values())
            sums = (f"{sum(us.values()):.0f}" if len(us) == len(self.products) else "-" for us in found)
            print(f"| {num_rows:,} | " + " | ".join(sums) + " |")


def find_compiler() -> None:
    """Lets the processes that compile find NVRTC's built-ins, which lie beside it; without NVRTC it is nvcc."""
    from humming.utils.nvrtc import get_nvrtc_library_path

    try:
        folder = str(Path(get_nvrtc_library_path()).parent)
    except RuntimeError as error:
        os.environ["HUMMING_COMPILER"] = "nvcc"
        print_line(compiler="nvcc", no_nvrtc=str(error)[:200])
        return
    paths = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(paths)  # this process has read it already


def weight_of(form: Form, num_out: int, size: int) -> IntegerWeight | Float8Weight:
    """Random, and such that both layouts hold the same values: a scale of 16 bits, codes of 8 bits from -127."""
    weight = random_weight(f"int4/{GROUP}" if form.kind == "int4" else form.kind, num_out, size)
    if isinstance(weight, Float8Weight):
        return Float8Weight(weight.codes, weight.scales.bfloat16().float())
    if weight.bits == 8:
        return weight._replace(codes=weight.codes.clamp_(min=-127))
    if form.spares_least:
        low, high = (weight.codes & 15).clamp_(min=1), (weight.codes >> 4).clamp_(min=1)
        return weight._replace(codes=low | high << 4)
    return weight


def prepare(form: Form, weight: IntegerWeight | Float8Weight) -> Prepared:
    """In humming's layout; its own layer takes these steps."""
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    codes = weight.codes
    if codes.dtype is torch.int8:
        codes = codes.view(torch.uint8) ^ 128  # its codes are what lies above the least
    tensors = {"weight": codes.view(torch.int32), "weight_scale": weight.scales.bfloat16()}
    schema = HummingWeightSchema(b_dtype=form.codes, weight_scale_group_size=GROUP if form.kind == "int4" else 0)
    if form.activations != "int8":
        schema, tensors = schema.convert_symmetric_integer_weight(tensors)
    rows, options = HummingInputSchema(a_dtype=form.activations), {"torch_dtype": torch.bfloat16, "device": 0}
    config, tensors = prepare_and_transform_humming_tensors(tensors, *weight.shape, schema, rows, **options)
    return Prepared(config, tensors, torch.zeros(2048, dtype=torch.int32, device="cuda"))


def tuning_of(config: Any, num_rows: int) -> str:
    """Launch parameters that humming chooses, as it takes them."""
    from humming.tune import get_heuristics_config

    return json.dumps(get_heuristics_config(config, shape_m=num_rows, device=0))


def multiply(x: Tensor, weight: Prepared, tuning: str, *, gated: bool = False) -> Tensor:
    """``x @ weight.T`` by humming, or with ``gated`` its SwiGLU."""
    from humming.forward import humming_forward

    out = humming_forward(weight.config, x, **weight.tensors, locks=weight.locks, tuning_config=tuning)
    return swiglu(out) if gated else out


def compile_product(weight: Prepared, num_rows: int) -> tuple[float, str | None]:
    """Seconds to compile what ``multiply`` launches, and what went wrong."""
    from humming.forward import may_quant_input
    from humming.kernel.humming import HummingKernel

    start, config = time.monotonic(), weight.config
    try:
        HummingKernel.prepare_kernels(config.to_str(), None, tuning_of(config, num_rows), 0)
        may_quant_input(config, torch.zeros(num_rows, config.shape_k, dtype=torch.bfloat16, device="cuda"))
    except Exception as error:
        return time.monotonic() - start, f"{num_rows} rows: {type(error).__name__}: {error}"[:300]
    return time.monotonic() - start, None


def compile_form(name: str, weights: list[Prepared], row_numbers: list[int], start: float) -> None:
    """All kernels of a form at once; ``start`` is when the first weight was brought into humming's layout."""
    jobs = itertools.product(row_numbers, weights)
    with ThreadPoolExecutor(PROCESSES) as pool:  # each waits for a compiler of its own
        results = list(pool.map(lambda job: compile_product(job[1], job[0]), jobs))
    seconds, errors = [found for found, _ in results], [error for _, error in results if error]
    print_line(
        compiled=name,
        products=len(results),
        seconds=time.monotonic() - start,
        mean_of_one=sum(seconds) / len(seconds),
        failed=len(errors),
        errors=errors[:4],
    )


def is_right(name: str, product: str, x: Tensor, weight: IntegerWeight | Float8Weight, multiplied: Prepared) -> bool:
    """Whether the product is as near as ours has to be; says so where it is not."""
    fields = {"way": name, "rows": len(x), "product": product}
    try:
        out = multiply(x, multiplied, tuning_of(multiplied.config, len(x)))
        error = relative_error(out, x, weight, None)
    except Exception as failure:
        print_line(**fields, failed=f"{type(failure).__name__}: {failure}"[:300])
        return False
    right = error <= (MAX_ERROR if FORMS[name].activations == "bfloat16" else MAX_FLOAT8_ERROR)
    print_line(**fields, error=error, right=right)
    return right


def time_form(name: str, shapes: dict[str, tuple[int, int]], row_numbers: list[int], times: Times) -> None:
    """A form of humming, and ours of its kind unless that was timed."""
    form, start = FORMS[name], time.monotonic()
    firsts = {product: weight_of(form, *shape) for product, shape in shapes.items()}
    prepared = {product: prepare(form, weight) for product, weight in firsts.items()}
    compile_form(name, list(prepared.values()), row_numbers, start)
    ours = f"ours {form.kind}"
    times_ours = not times.has(ours)
    for product, shape in shapes.items():
        gated, first = product == "gate_up", firsts.pop(product)
        more = max(1, -(-WEIGHTS_NBYTES // first.codes.nbytes) - 1)
        weights = [first, *(weight_of(form, *shape) for _ in range(more))]
        theirs = [prepared.pop(product), *(prepare(form, weight) for weight in weights[1:])]
        packed = [pack(weight) for weight in weights] if times_ours else []
        for num_rows in row_numbers:
            x = random_rows(num_rows, shape[1])
            if times_ours:
                call = partial(product_of(form.kind), gated=gated)
                times.add(ours, num_rows, product, [partial(call, x, weight) for weight in packed])
            if is_right(name, product, x, first, theirs[0]):
                tuning = tuning_of(theirs[0].config, num_rows)
                calls = [partial(multiply, x, weight, tuning, gated=gated) for weight in theirs]
                times.add(name, num_rows, product, calls, tuning=json.loads(tuning))


def time_plain(shapes: dict[str, tuple[int, int]], row_numbers: list[int], times: Times) -> None:
    """The engine's products of weights in bf16: torch's, and a kernel of ours for few rows."""
    for product, shape in shapes.items():
        weights = [random_rows(*shape) for _ in range(max(2, -(-WEIGHTS_NBYTES // (2 * shape[0] * shape[1]))))]
        for num_rows in row_numbers:
            x, call = random_rows(num_rows, shape[1]), linear_swiglu if product == "gate_up" else linear
            times.add("bf16", num_rows, product, [partial(call, x, weight) for weight in weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--forms", default=",".join(FORMS), help="a comma between names; the first is timed first")
    parser.add_argument("--budget", type=float, default=130.0, help="seconds after which no form is begun")
    args = parser.parse_args()
    if importlib.util.find_spec("humming") is None:
        raise SystemExit("humming-kernels is not installed: pip install humming-kernels")
    names, row_numbers = args.forms.split(","), [int(n) for n in args.rows.split(",")]
    if unknown := set(names) - FORMS.keys():
        raise SystemExit(f"--forms {','.join(sorted(unknown))}: there are {', '.join(FORMS)}")
    shapes = {name: shape for name, shape in sizes(config_from_hf(SHAPES[args.shape])).items() if name != "lm_head"}
    start, times = time.monotonic(), Times(list(shapes))
    pool = get_context("fork").Pool(PROCESSES)  # before this process has a CUDA context, which no child may inherit
    torch.set_default_device("cuda")
    print_line(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    compile_all(pool, timed(shapes, row_numbers))
    time_plain(shapes, row_numbers, times)
    if os.environ.get("HUMMING_COMPILER") != "nvcc":
        find_compiler()
    for name in names:
        if time.monotonic() - start > args.budget:
            print_line(way=name, skipped="the budget is spent")
            continue
        try:
            time_form(name, shapes, row_numbers, times)
        except Exception as failure:
            print_line(way=name, failed=f"{type(failure).__name__}: {failure}"[:300])
        print_line(after_s=time.monotonic() - start)
    times.print_table(row_numbers)


if __name__ == "__main__":
    main()
