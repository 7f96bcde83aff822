"""Layout of quantized weights that the kernels read.

Codes of 4 bits lie so that the two halves of neighbouring bytes are columns of the same half of a span: in registers
nothing has to change its place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..nvidia import is_nvidia
from .codes import BLOCK, FLOAT4_GROUP, Float4Weight, Float8Weight, IntegerWeight

MAX_SPAN = 128  # columns
SCALES_A_WORD, ZEROS_A_WORD = 2, 4
FLOAT4_SPAN = 2 * FLOAT4_GROUP  # either half of it has its own scale; two spans have a word of them
ROWS_AT_ONCE = 16_384  # that are packed
MAX_EXPONENT = 128  # of a scale of 4-bit floats that kernels multiply by, with its bias: 2.0


class PackedCodes(NamedTuple):
    """A quantized weight [O, I] as kernels read it.

    ``codes`` of 4 bits: uint8 [O, spans of I columns * span / 2], in each span byte j has column j in its low half,
    column j + span / 2 in its high one. Of 8 bits: int8 or float8_e4m3fn [O, I]. ``span``: columns that kernels read
    together, which share a row's scale. ``scales``, ``zeros`` and ``order`` are those of the containers,
    rows of several groups filled up to whole words of both.

    Of 4-bit floats either half of a span has its own scale, bits of a byte lie as ``_spread`` puts them, and rows are
    filled up to an even number of spans.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    num_columns: int
    group: int
    span: int

    @property
    def kind(self) -> str:
        """What ``kernels.linear.unpack`` calls the codes; of 4 bits, those of floats have exponents for scales."""
        if self.codes.dtype is torch.uint8:
            return "float4" if self.scales.dtype is torch.uint8 else "int4"
        return "int8" if self.codes.dtype is torch.int8 else "float8"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight, ``(O, I)``."""
        return self.codes.shape[0], self.num_columns

    @property
    def num_spans(self) -> int:
        """Spans of a row, the last one or two of which may not be full."""
        return self.codes.shape[1] * 2 // self.span if self.bits == 4 else -(-self.num_columns // self.span)

    @property
    def is_blockwise(self) -> bool:
        """Whether rows share scales, too."""
        return self.kind == "float8" and self.scales.shape != (len(self.codes), 1)

    def group_operands(self, *, in_words: bool = True) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros as kernels take them: of several groups ``in_words``, or as they are.

        Those of 4-bit floats always are words: int32 [O, ceil(I / 128)].
        """
        scales, zeros = self.scales, self.zeros
        if self.kind != "float4" and (not in_words or scales.shape[1] == 1 or scales.dtype.itemsize == 4):
            return scales, zeros
        return scales.view(torch.int32), None if zeros is None else zeros.view(torch.int32)

    @property
    def constexprs(self) -> dict[str, object]:
        """Compile-time arguments of the kernels that read it."""
        found = {"K": self.num_columns, "GROUP": self.group, "SPAN": self.span, "KIND": self.kind}
        found["GROUPS"] = self.scales.shape[1] // (4 if self.kind == "float4" else 1)
        return found | {"BLOCKS": self.is_blockwise, "ASM": is_nvidia(self.codes.device)}


def pack(weight: IntegerWeight | Float8Weight | Float4Weight) -> PackedCodes:
    """``weight`` as kernels read it; codes of 8 bits are kept as they are."""
    num_columns = weight.shape[1]
    if isinstance(weight, Float4Weight):
        missing = -num_columns % (2 * FLOAT4_SPAN)
        codes, scales = pad(weight.codes, (0, missing // 2)), pad(weight.scales, (0, missing // FLOAT4_GROUP))
        codes = _split(codes, FLOAT4_SPAN, spread=True)
        return PackedCodes(codes, scales.contiguous(), None, None, num_columns, FLOAT4_GROUP, FLOAT4_SPAN)
    if isinstance(weight, Float8Weight):
        group = BLOCK if weight.is_blockwise else num_columns
        return PackedCodes(weight.codes, weight.scales, None, None, num_columns, group, MAX_SPAN)
    span = min(weight.group, MAX_SPAN) if weight.group < num_columns else MAX_SPAN
    codes = weight.codes if weight.bits == 8 else _split(weight.codes, span)
    scales, zeros = weight.scales, weight.zeros
    missing = -scales.shape[1] % (SCALES_A_WORD if zeros is None else ZEROS_A_WORD)
    if missing and weight.group < num_columns:
        scales, zeros = pad(scales, (0, missing)), None if zeros is None else pad(zeros, (0, missing))
    return PackedCodes(codes, scales, zeros, weight.order, num_columns, weight.group, span)


def can_pack(weight: IntegerWeight | Float8Weight | Float4Weight) -> bool:
    """Whether kernels can read ``weight``: scales of 4-bit floats are at most 2."""
    return not isinstance(weight, Float4Weight) or int(weight.scales.max()) <= MAX_EXPONENT


def unpack(packed: PackedCodes) -> IntegerWeight | Float8Weight | Float4Weight:
    """The container that ``pack`` was given."""
    codes = packed.codes
    if packed.kind == "float8":
        return Float8Weight(codes, packed.scales)
    if packed.bits == 4:
        codes = _gather(codes) if packed.kind == "float4" else codes
        codes = codes.view(len(codes), -1, 1, packed.span // 2)
        halves = torch.cat([codes & 15, codes >> 4], 2).flatten(1)[:, : packed.num_columns]
        codes = halves[:, ::2] | halves[:, 1::2] << 4
    if packed.kind == "float4":
        return Float4Weight(codes, packed.scales[:, : packed.num_columns // FLOAT4_GROUP].contiguous())
    groups, zeros = packed.num_columns // packed.group, packed.zeros
    zeros = None if zeros is None else zeros[:, :groups].contiguous()
    return IntegerWeight(codes, packed.scales[:, :groups].contiguous(), zeros, packed.order)


def _split(codes: Tensor, span: int, *, spread: bool = False) -> Tensor:
    """Bytes of neighbouring columns as bytes of both halves of a span, the last one filled with zeros.

    Some rows at a time: those of many experts would take several times their memory. ``spread``: see ``_spread``.
    """
    found = codes.new_empty(len(codes), -(-codes.shape[1] * 2 // span) * span // 2)
    for part, to in zip(codes.split(ROWS_AT_ONCE), found.split(ROWS_AT_ONCE), strict=True):
        halves = torch.stack([part & 15, part >> 4], 2).flatten(1)
        halves = pad(halves, (0, -halves.shape[1] % span)).view(len(part), -1, 2, span // 2)
        bytes_of = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        to.copy_(_spread(bytes_of) if spread else bytes_of)
    return found


def _spread(codes: Tensor) -> Tensor:
    """Bytes of two 4-bit floats so that few instructions bring their bits to those of 16-bit floats.

    From bit 7 on: sign, lower exponent bit and mantissa of the high half, all of the low half, the upper exponent bit.
    """
    return codes & 0x80 | codes << 1 & 0x7E | codes >> 6 & 1


def _gather(codes: Tensor) -> Tensor:
    """Undoes ``_spread``."""
    return codes & 0x80 | (codes & 1) << 6 | codes >> 1 & 0x3F
