"""Words of eleven 3-bit codes beside plain codes, in pages of 128 tokens: ``python -m studies.papers.three_bits``.

Prints bits per element of a page's channel, codes alone and with fp16 step and minimum of each group, and the mean
squared error on standard normal values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qkv_engine.bench.table import Table, as_markdown
from qkv_engine.config import BLOCK_TOKENS

from . import quantizers
from .quantizers import WORD_THREES, Codes

VALUES = 2**22  # drawn a row; enough for three digits of the error
META_BITS = 32  # of a group: step and minimum in fp16


def row(
    name: str, quantize: Callable[[Tensor], Codes], group: int, word: int, word_bits: int, num_values: int
) -> list[str]:
    """A line of the table: words of ``word_bits`` bits that hold ``word`` codes, metadata of ``group`` elements."""
    x = torch.randn(num_values // group, group, generator=torch.Generator().manual_seed(0))
    square = (quantize(x).values() - x).square()
    code_bits = math.ceil(BLOCK_TOKENS / word) * word_bits / BLOCK_TOKENS
    all_bits = code_bits + math.ceil(BLOCK_TOKENS / group) * META_BITS / BLOCK_TOKENS
    eleventh = f"{float(square[:, 10::11].mean()):.4f}" if word == WORD_THREES else ""
    return [name, str(group), f"{code_bits:.2f}", f"{all_bits:.2f}", f"{float(square.mean()):.4f}", eleventh]


def table(num_values: int = VALUES) -> Table:
    """Every form of 3 bits, and 2 and 4 beside them, each on ``num_values`` normal values."""
    plain = [
        row(f"plain {bits}-bit", partial(quantizers.kvmix, bits=bits), group, 1, bits, num_values)
        for bits, group in ((3, 128), (3, 64), (3, 32), (4, 128), (4, 32), (2, 32))
    ]
    words = [
        row(f"11 in 32, {step}", partial(quantizers.kvmix_three, faithful=faithful), group, WORD_THREES, 32, num_values)
        for step, faithful, group in (
            ("as released", True, 11),
            *(("own step", False, group) for group in (11, 33, 66, 132)),
        )
    ]
    headers = ["codes", "group", "code bits", "with metadata", "MSE", "MSE of each eleventh"]
    return Table("", headers, [*words, *plain], [])


if __name__ == "__main__":
    print(as_markdown(table()), end="")
