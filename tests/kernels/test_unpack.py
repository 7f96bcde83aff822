"""Assembly that unpacks 4-bit floats, instruction by instruction in Python, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qkv_engine.kernels.linear import Float4Weight, codes_reference
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.linear.unpack import FLOAT4_BF16, FLOAT4_FP16, SCALED_FLOAT4_BF16, SCALED_FLOAT4_FP16

from .ptx import halves, run_ptx

TEXTS = {torch.bfloat16: (FLOAT4_BF16, SCALED_FLOAT4_BF16), torch.float16: (FLOAT4_FP16, SCALED_FLOAT4_FP16)}


@pytest.mark.parametrize("exponent", [None, 0, 1, 118, 126, 127, 130, 254])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_pairs_of_codes(dtype: torch.dtype, exponent: int | None) -> None:
    """Every byte, in each of four places; scales that float16 has."""
    if dtype is torch.float16 and exponent in (0, 1, 254):
        pytest.skip("float16 has no such power of two")
    halves_of = torch.arange(256, dtype=torch.uint8).view(
        8, 32
    )  # columns of a span's low half; the high one is another
    values = torch.cat([halves_of & 15, halves_of >> 4], 1)
    weight = Float4Weight(values[:, ::2] | values[:, 1::2] << 4, torch.full((8, 2), exponent or 127, dtype=torch.uint8))
    if exponent == 0:
        weight.scales.zero_()
    expected = codes_reference.dequantize(weight).to(dtype).view(torch.int16).int() & 0xFFFF
    power = torch.tensor(2.0 ** ((127 if exponent is None else exponent) - 127)).to(dtype).view(torch.int16).item()
    scales = [] if exponent is None else [int(power) * 0x10001] * 4
    text = TEXTS[dtype][exponent is not None].value
    packed, wrong = pack(weight).codes, 0
    for row in range(8):
        for column in range(0, 32, 4):
            word = int.from_bytes(bytes(packed[row, column : column + 4].tolist()), "little")
            low_0, low_1, high_0, high_1 = (halves(result) for result in run_ptx(text, 4, word, *scales))
            wrong += [*low_0, *low_1] != expected[row, column : column + 4].tolist()
            wrong += [*high_0, *high_1] != expected[row, 32 + column : 36 + column].tolist()
    assert not wrong
