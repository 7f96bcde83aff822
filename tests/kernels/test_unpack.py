"""Assembly that unpacks codes of weights and multiplies them, interpreted on a CPU: every code at every place."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qkv_engine.kernels.linear import code_sum
from qkv_engine.kernels.linear.codes import FLOAT4_VALUES
from qkv_engine.kernels.linear.packed import MAX_EXPONENT, _spread

from .ptx import pairs, run, words_of

DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16"}
OUTPUTS = ["$0", "$1", "$2", "$3"]
SHIFT = {torch.bfloat16: 128.0, torch.float16: 1024.0}  # what a code's place in a mantissa adds
SIGNED_FLOAT4 = torch.tensor([*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES)])


def all_bytes() -> Tensor:
    """Every byte at each of four places, beside others: uint8 [1024, 4]."""
    draw = torch.Generator().manual_seed(0)
    columns = [torch.cat([torch.randperm(256, generator=draw) for _ in range(4)]) for _ in range(4)]
    return torch.stack(columns, dim=1).to(torch.uint8)


def text_of(name: str, dtype: torch.dtype) -> str:
    text: str = getattr(import_module(code_sum.__package__ + ".unpack"), f"{name}_{DTYPES[dtype]}").value
    return text


def halves(name: str, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Floats [1024, 8] that assembly gives for all bytes, of low halves, then of high ones.

    Each of ``operands`` [1024, 4] is two registers.
    """
    words = [words_of(all_bytes()), *(words_of(part) for each in operands for part in each.split(2, dim=1))]
    inputs = {f"${4 + number}": each for number, each in enumerate(words)}
    found = run(text_of(name, dtype), inputs, OUTPUTS)
    return torch.cat([pairs(each, dtype) for each in found], dim=1)


def codes() -> Tensor:
    """The low halves of all bytes, then the high ones, [1024, 8]."""
    return torch.cat([all_bytes() & 15, all_bytes() >> 4], dim=1).float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_of_4_bits(dtype: torch.dtype) -> None:
    zeros = torch.randint(0, 16, (1024, 4)).float()
    scales = torch.randn(1024, 4).to(dtype)
    minus, both_scales = (-SHIFT[dtype] - zeros).to(dtype), scales.double().repeat(1, 2)
    less_8, less_zeros = codes() - 8, codes() - zeros.repeat(1, 2)
    assert torch.equal(halves("FOUR_BITS", dtype), less_8.to(dtype))
    assert torch.equal(halves("ZEROS", dtype, minus), less_zeros.to(dtype))
    assert torch.equal(halves("SCALED", dtype, scales), (less_8 * both_scales).to(dtype))
    assert torch.equal(halves("BOTH", dtype, minus, scales), (less_zeros * both_scales).to(dtype))


@pytest.mark.parametrize("exponents", [(0, 1, 127, 113), (118, 127, 113, MAX_EXPONENT), (MAX_EXPONENT, 0, 1, 118)])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, 126), (torch.float16, 14)])
def test_floats_of_4_bits(dtype: torch.dtype, bias: int, exponents: tuple[int, ...]) -> None:
    """Bytes as they are packed; the operands make up for where bits stand. Signs of zeros, too.

    ``exponents``: of the low halves of two rows, of which two bytes are each, then of the high halves.
    """
    inputs = {"$4": words_of(_spread(all_bytes()))}
    for half, exponent in enumerate(exponents):
        factor = words_of(torch.full((1024, 2), 2.0 ** (exponent - 127 + bias)).to(dtype))
        inputs |= {f"${5 + 2 * half + byte}": factor for byte in (0, 1)}
    found = torch.cat([pairs(each, dtype) for each in run(text_of("FLOAT4", dtype), inputs, OUTPUTS)], dim=1)
    scales = torch.tensor([2.0 ** (exponent - 127) for exponent in exponents for _ in (0, 1)], dtype=torch.float64)
    values = (SIGNED_FLOAT4[codes().int()].double() * scales).to(dtype)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), [("EIGHT_BITS", torch.int8), ("FLOAT8", torch.float8_e4m3fn)])
def test_codes_of_8_bits(name: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    found = run(text_of(name, dtype), {"$2": words_of(all_bytes())}, ["$0", "$1"])
    values = all_bytes().view(kind).float()
    is_number = ~values.isnan()
    assert torch.equal(torch.cat([pairs(each, dtype) for each in found], dim=1)[is_number], values.to(dtype)[is_number])


@pytest.mark.parametrize(
    ("text", "kind"), [(code_sum.SUM_OF_INT8, torch.int8), (code_sum.SUM_OF_FLOAT8, torch.float8_e4m3fn)]
)
def test_sums_of_8_bits(text: object, kind: torch.dtype) -> None:
    """Four words; a column is one byte of each. Floats stand in their places as 2^-120 of what they are."""
    numbers, x = torch.stack([all_bytes().roll(shift, 0) for shift in range(4)]), torch.randn(4, 4, 1024)
    factor = code_sum.FLOAT8_FACTOR.value if kind is torch.float8_e4m3fn else 1.0
    inputs = {f"${4 + word}": words_of(numbers[word]) for word in range(4)}
    inputs |= {
        f"${8 + 4 * column + word}": words_of(x[column, word] * factor) for column in range(4) for word in range(4)
    }
    found = run(text.value, inputs, OUTPUTS)  # type: ignore[attr-defined]
    values = numbers.view(kind).double().permute(2, 0, 1)
    is_number = ~values.isnan().any(dim=(0, 1))
    sums = torch.from_numpy(found[0].copy()).view(torch.float32).double() * factor
    size = (values * x.double()).abs().sum((0, 1))
    error = (sums - (values * x.double()).sum((0, 1))).abs() / size
    assert float(error[is_number].max()) < 2e-6 and not any(each.any() for each in found[1:])


def test_sums_of_4_bits() -> None:
    """A low half becomes 128 + code, a high one 128 + code / 16; the last four operands begin the sum."""
    numbers = torch.stack([all_bytes().roll(shift, 0) for shift in range(4)])  # [word, N, byte]
    x, minus = torch.randn(8, 4, 1024), torch.randn(4, 1024)
    inputs = {f"${4 + word}": words_of(numbers[word]) for word in range(4)}
    inputs |= {f"${8 + 4 * column + word}": words_of(x[column, word]) for column in range(8) for word in range(4)}
    inputs |= {f"${40 + word}": words_of(minus[word]) for word in range(4)}
    found = run(code_sum.SUM_OF_INT4.value, inputs, OUTPUTS)
    low, high = (numbers & 15).double() + 128, (numbers >> 4).double() / 16 + 128
    values = torch.cat([low, high], dim=2).permute(2, 0, 1)  # [column, word, N]
    expected = (values * x.double()).sum((0, 1)) + minus.double().sum(0)
    sums = torch.from_numpy(found[0].copy()).view(torch.float32).double()
    size = (values * x.double()).abs().sum((0, 1))
    assert float(((sums - expected).abs() / size).max()) < 2e-6 and not any(each.any() for each in found[1:])
