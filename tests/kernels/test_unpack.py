"""Assembly that unpacks 4-bit floats, instruction by instruction in Python, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qkv_engine.kernels.linear import Float4Weight, codes_reference
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.linear.unpack import FLOAT4_BF16, FLOAT4_FP16

from .ptx import halves, run_ptx

# Assembly, and the power of two that its operands make up for.
TEXTS = {torch.bfloat16: (FLOAT4_BF16, 126), torch.float16: (FLOAT4_FP16, 14)}


@pytest.mark.parametrize("exponent", [0, 1, 113, 118, 127, 128])
@pytest.mark.parametrize("dtype", TEXTS)
def test_all_pairs_of_codes(dtype: torch.dtype, exponent: int) -> None:
    """Every byte, in each of four places; powers of two that kernels take."""
    pairs = torch.arange(256, dtype=torch.uint8).view(8, 32)
    values = torch.cat([pairs & 15, pairs >> 4], 1)  # columns of the low half of a span, and of the high one
    scales = torch.full((8, 2), exponent, dtype=torch.uint8)
    weight = Float4Weight(values[:, ::2] | values[:, 1::2] << 4, scales)
    expected = codes_reference.dequantize(weight).to(dtype).view(torch.int16).int() & 0xFFFF
    text, power = TEXTS[dtype]
    factor = torch.tensor(2.0 ** (exponent - 127 + power), dtype=dtype).view(torch.int16).item()
    packed, wrong = pack(weight).codes, 0
    for row in range(8):
        for column in range(0, 32, 4):
            word = int.from_bytes(bytes(packed[row, column : column + 4].tolist()), "little")
            results = run_ptx(text.value, 4, word, *[int(factor) * 0x10001] * 8)
            low_0, low_1, high_0, high_1 = (halves(result) for result in results)
            wrong += [*low_0, *low_1] != expected[row, column : column + 4].tolist()
            wrong += [*high_0, *high_1] != expected[row, 32 + column : 36 + column].tolist()
    assert not wrong
