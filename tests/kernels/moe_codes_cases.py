"""Cases of experts with quantized weights for Triton's interpreter: errors, or values that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.linear import Float4Weight, codes_reference
from qkv_engine.kernels.linear.codes import FLOAT4_GROUP, Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.integer import linear_integer
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.linear.unpack import unpack_float4
from qkv_engine.kernels.moe import CodedExperts, Experts, Routing, SwiGLU, reference
from qkv_engine.kernels.moe.codes import CodeTile, PairTiles, SortedTiles, Tuning, experts_mlp_codes
from qkv_engine.kernels.nvidia import is_nvidia

from .common import relative_error
from .fused_cases import DTYPES, fenced
from .interpreted import report
from .linear_codes_cases import _filled, float8_weight, integer_weight
from .moe_cases import GPT_OSS, PLAIN, make_routing

Weight = IntegerWeight | Float8Weight | Float4Weight
TUNINGS: dict[str, Tuning] = {
    "pairs": PairTiles(CodeTile(32, 128, 2, 3), CodeTile(16, 256, 2, 2, slices=2)),
    "small tiles": SortedTiles(8, CodeTile(16, 64, 2, 3, slices=2), CodeTile(32, 64, 2, 3)),
    "large tiles": SortedTiles(32, CodeTile(64, 64, 4, 3, scaled=True), CodeTile(64, 128, 4, 3, scaled=True)),
}
KINDS = {  # and sizes that it takes: of rows, and of inner features
    "float4": (96, 32),
    "int4/32": (96, 32),
    "int4/64 zeros": (192, 64),
    "int4": (72, 38),
    "int4/128": (384, 128),
    "int4 zeros": (144, 74),
    "int8": (80, 37),
    "int8/32": (160, 64),
    "float8": (144, 37),
    "float8 blocks": (256, 192),
}


def units(kind: str) -> tuple[int, int]:
    """Of what a row's size and the inner features are multiples."""
    name, _, group = kind.split()[0].partition("/")
    if kind == "float8 blocks":
        return 128, 64
    return (int(group or 2),) * 2 if name != "float4" else (FLOAT4_GROUP,) * 2


def make_weight(kind: str, num_out: int, size: int, dtype: torch.dtype) -> Weight:
    """Of a kind such as "int4/64 zeros". Scales are powers of two, so that scaled elements have no roundings.

    Values have about the size at which a product of ``size`` columns is as large as its inputs.
    """
    name, *options = kind.split()
    name, _, group = name.partition("/")
    if name == "float4":
        codes = torch.randint(0, 256, (num_out, size // 2), dtype=torch.uint8)
        middle = 126 - round(math.log2(size) / 2)
        scales = torch.randint(middle - 2, middle + 2, (num_out, size // FLOAT4_GROUP), dtype=torch.uint8)
        return Float4Weight(codes, scales)
    if name == "float8":
        weight = float8_weight(num_out, size, blocks=bool(options))
        spread = codes_reference.dequantize(weight).std()
        return weight._replace(scales=weight.scales / spread * size**-0.5)
    columns, bits = int(group) if group else size, 4 if name == "int4" else 8
    found = integer_weight(num_out, size, bits, columns, dtype, zeros=bool(options))
    middle = -round(math.log2(size) / 2) - bits + 2
    return found._replace(scales=2.0 ** (found.scales.log2().round() + middle))


def make_experts(
    kind: str, num: int, size: int, inner: int, dtype: torch.dtype, *, bias: bool = False, activation: SwiGLU = PLAIN
) -> Experts:
    """Containers, which are not packed yet, and a NaN before and behind biases."""
    shapes = (2 * inner, size), (size, inner)
    gate_up, down = (CodedExperts(make_weight(kind, num * n, k, dtype), num) for n, k in shapes)
    biases = [fenced(num, n, dtype=dtype)[0] if bias else None for n in (2 * inner, size)]
    return Experts(gate_up, down, *biases, activation)


def packed(experts: Experts) -> Experts:
    """As kernels read them, on any device."""
    gate_up, down = (part._replace(weight=pack(part.weight)) for part in _containers(experts))
    return experts._replace(gate_up=gate_up, down=down)


def mlp_error(
    num_rows: int,
    experts: Experts,
    top_k: int,
    tuning: Tuning | None,
    dtype: torch.dtype,
    favourites: int | None = None,
) -> float:
    """Relative error; results are NaN before they are written."""
    routing = make_routing(num_rows, experts.num_experts, top_k, favourites=favourites)
    x, _ = fenced(num_rows, experts.down.shape[1], dtype=dtype)
    with patch.object(Tensor, "new_empty", _filled):
        found = experts_mlp_codes(x, routing, packed(experts), tuning=tuning)
    assert found.shape == x.shape and found.dtype == dtype
    return relative_error(found, reference.experts_mlp(x, routing, experts))


def untouched_experts(kind: str, tuning: Tuning, num_rows: int) -> float:
    """Experts that no token chose have scales that are no numbers, and are not read."""
    experts = make_experts(kind, 8, *KINDS[kind], torch.bfloat16, bias=True)
    for part in _containers(experts):
        touched = len(part.weight.scales) * 3 // 8
        part.weight.scales[touched:] = 255 if part.weight.scales.dtype is torch.uint8 else float("nan")
    for bias in experts[2:4]:
        bias[3:] = float("nan")
    return mlp_error(num_rows, experts, 2, tuning, torch.bfloat16, favourites=3)


def alone(kind: str, tuning: Tuning, num_rows: int) -> float:
    """A row has the same bits whichever rows are beside it, and wherever it is."""
    size, inner = KINDS[kind]
    experts, x = packed(make_experts(kind, 5, size, inner, torch.bfloat16)), torch.randn(num_rows, size).bfloat16()
    routing, order = make_routing(num_rows, 5, 2), torch.randperm(num_rows)
    call = partial(experts_mlp_codes, experts=experts, tuning=tuning)
    together, mixed = call(x, routing), call(x[order], Routing(*(part[order] for part in routing)))
    few = call(x[:3], Routing(*(part[:3].contiguous() for part in routing)))
    return float(not (torch.equal(together[order], mixed) and torch.equal(together[:3], few)))


@triton.jit
def float4_kernel(codes_ptr, scales_ptr, out_ptr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """``out`` [ROWS, 64], of packed ``codes`` [ROWS, 64], the first half of each row, and ``scales`` [ROWS, 4]."""
    o_n, o_k = tl.arange(0, ROWS)[:, None], tl.arange(0, 32)[None, :]
    b_low, b_high = tl.load(scales_ptr + o_n * 4).to(tl.int32), tl.load(scales_ptr + o_n * 4 + 1).to(tl.int32)
    b_codes = tl.load(codes_ptr + o_n * 64 + o_k)
    b_low, b_high = unpack_float4(b_codes, b_low, b_high, out_ptr.dtype.element_ty, ASM)
    tl.store(out_ptr + o_n * 64 + o_k, b_low)
    tl.store(out_ptr + o_n * 64 + 32 + o_k, b_high)


def float4_values(exponents: list[int], dtype: torch.dtype) -> float:
    """Products of all codes and powers of two, in either half, that have other bits than the reference's."""
    scales = torch.tensor([exponents, exponents[::-1]], dtype=torch.uint8).T.contiguous()
    codes = torch.stack([torch.randperm(32) % 16 for _ in range(2 * len(exponents))]).view(len(exponents), 64)
    weight = Float4Weight((codes[:, ::2] | codes[:, 1::2] << 4).byte(), scales)
    found, as_kernels_read = torch.full((len(exponents), 64), float("nan"), dtype=dtype), pack(weight)
    operands = as_kernels_read.codes, as_kernels_read.scales, found
    float4_kernel[(1,)](*operands, ROWS=len(exponents), ASM=is_nvidia(found.device), num_warps=1, **FUSED)
    expected = codes_reference.dequantize(weight).to(dtype)
    return float((found.view(torch.int16) != expected.view(torch.int16)).sum())


def written_out_product(num_rows: int, dtype: torch.dtype) -> float:
    """A dense product with 4-bit floats."""
    weight, x = make_weight("float4", 37, 96, dtype), fenced(num_rows, 96, dtype=dtype)[0]
    return relative_error(linear_integer(x, pack(weight)), codes_reference.linear(x, weight))


def product_cases(name: str, tuning: Tuning) -> Iterator[tuple[str, Callable[[], float]]]:
    """Every kind; SwiGLU without biases in bfloat16, gpt-oss's activation with them in float16."""
    num_rows = 3 if isinstance(tuning, PairTiles) else 17
    for kind, (size, inner) in KINDS.items():
        for dtype, bias, activation in (("bf16", False, PLAIN), ("fp16", True, GPT_OSS)):

            def case(
                kind: str = kind, shape: tuple[int, int, int] = (5, size, inner), dtype: torch.dtype = DTYPES[dtype],
                bias: bool = bias, activation: SwiGLU = activation,
            ) -> float:  # fmt: skip
                experts = make_experts(kind, *shape, dtype, bias=bias, activation=activation)
                return mlp_error(num_rows, experts, 2, tuning, dtype)

            yield f"{dtype} {kind}, {name}", case
    for kind in ("float4", "int4/64 zeros", "float8 blocks"):
        yield f"bf16 untouched {kind}, {name}", partial(untouched_experts, kind, tuning, num_rows)
    yield f"equal: alone, {name}", partial(alone, "float4", tuning, num_rows + 2)


def _containers(experts: Experts) -> tuple[CodedExperts, CodedExperts]:
    gate_up, down = experts[:2]
    assert isinstance(gate_up, CodedExperts) and isinstance(down, CodedExperts)
    return gate_up, down


def cases() -> dict[str, Callable[[], float]]:
    torch.manual_seed(0)
    found: dict[str, Callable[[], float]] = {}
    for name, tuning in TUNINGS.items():
        found |= dict(product_cases(name, tuning))
    found["equal: 4-bit floats bf16"] = lambda: float4_values([0, 1, *range(115, 129)], torch.bfloat16)
    found["equal: 4-bit floats fp16"] = lambda: float4_values([*range(113, 129)], torch.float16)
    for name, dtype in list(DTYPES.items())[:2]:
        found[f"{name} dense 4-bit floats"] = partial(written_out_product, 3, dtype)
        for num_rows in (1, 9, 33):  # launched as the engine does
            found[f"{name} chosen {num_rows}"] = lambda n=num_rows, d=dtype: mlp_error(
                n, make_experts("float4", 8, 288, 96, d, bias=True), 2, None, d
            )
    return found


if __name__ == "__main__":
    made = cases()
    some = {name: case for index, (name, case) in enumerate(made.items()) if index % 4 == 0 or name.startswith("equal")}
    report(some, slow={name: case for name, case in made.items() if name not in some})
