"""Quantizers of groups of values as KIVI, Kitty and KVmix released them, and the 32-bit words that codes are packed in.

Each takes groups ``[..., G]`` of any float type; a group's codes, step and minimum stand along the last dimension. A
constant group has codes 0 and its minimum as values everywhere; the releases of KIVI and KVmix divide 0 by 0 there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD_THREES = 11  # elements of KVmix's word of 3-bit codes: ten of 3 bits, and the last of 2
STEP_FLOOR = 1e-6  # Kitty's engine: a smaller step counts as this one, so nearly constant groups keep codes near 0
RANGE_FLOOR = 1e-4  # Kitty's simulator: a smaller range of a group counts as this one


class Codes(NamedTuple):
    """Integer codes ``[..., G]`` int32, and ``step`` and ``minimum`` in fp16, which broadcast to them."""

    codes: Tensor
    step: Tensor
    minimum: Tensor

    def values(self) -> Tensor:
        """minimum + code * step, ``[..., G]`` float32."""
        return self.codes * self.step.float() + self.minimum.float()


def kivi(groups: Tensor, bits: int) -> Codes:
    """KIVI's codes: all arithmetic in fp16, halves to even.

    Source:  KIVI (arXiv 2402.02750), quant/new_pack.py
    """
    low, span, x = _extent(groups.half())
    step = span / _top(bits)
    return Codes(_limited((x / _divisor(step)).round(), bits), step, low)


def kitty(groups: Tensor, bits: int | Tensor) -> Codes:
    """Codes of Kitty's engine: float32 from fp16 input, ``floor(x + 0.5)``, the step at least 1e-6.

    ``bits`` is a number, or one for each group, ``[..., 1]``.
    Source:  Kitty (arXiv 2511.18643), kitty_quant_pack.py; Triton's min and max of fp16 are float32
    """
    low, span, x = _extent(groups.half().float())
    step = (span / _top(bits)).clamp(min=STEP_FLOOR)
    return Codes(_limited((x / step + 0.5).floor(), bits), step.half(), low.half())


def kitty_simulator(groups: Tensor, bits: int | Tensor) -> Codes:
    """Codes of Kitty's accuracy simulator: fp16, halves to even, the range at least 1e-4; ``bits`` as of ``kitty``.

    Source:  Kitty (arXiv 2511.18643), kitty_sim/utils_quant.py
    """
    low, span, x = _extent(groups.half())
    step = (span.clamp(min=RANGE_FLOOR) / _top(bits)).half()
    return Codes(_limited((x / step).round(), bits), step, low)


def kvmix(groups: Tensor, bits: int) -> Codes:
    """KVmix's codes: float32, halves up; the step is rounded to fp16 after the codes were computed with it.

    Source:  KVmix (arXiv 2506.08018), quantization_cuda.cu
    """
    low, span, x = _extent(groups.float())
    step = span / _top(bits)
    return Codes(_limited(_round_half_up(x / _divisor(step)), bits), step.half(), low.half())


def kvmix_three(groups: Tensor, *, faithful: bool) -> Codes:
    """KVmix's 3-bit codes, 11 to a word, of which the eleventh has 2 bits; G is a multiple of 11.

    The release has groups of 11, whose eleventh element is coded by the same step, range / 7, and saturates at code 3
    (``faithful``). Otherwise the eleventh element's step is range / 3.
    """
    low, span, x = _extent(groups.float())
    is_last = torch.arange(groups.shape[-1]) % WORD_THREES == WORD_THREES - 1
    top = torch.where(is_last, 3, 7)
    step = span / (7 if faithful else top)
    codes = _round_half_up(x / _divisor(step)).clamp(min=0).minimum(top)
    return Codes(codes.int(), step.half(), low.half())


def _extent(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum and range of each group, ``[..., 1]``, and the values less the minimum."""
    low = x.amin(-1, keepdim=True)
    return low, x.amax(-1, keepdim=True) - low, x - low


def _top(bits: int | Tensor) -> int | Tensor:
    return 2**bits - 1


def _divisor(step: Tensor) -> Tensor:
    return torch.where(step > 0, step, 1)


def _round_half_up(x: Tensor) -> Tensor:
    """``roundf`` of values >= 0; adding 0.5 first would lift the float just below a half."""
    return x.floor() + (x - x.floor() >= 0.5)


def _limited(codes: Tensor, bits: int | Tensor) -> Tensor:
    return codes.clamp(min=0).minimum(torch.as_tensor(_top(bits), dtype=codes.dtype)).int()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., n]`` as int32 words ``[..., n / per word]``, the first in the least significant bits.

    A word holds 32 / bits codes, or 11 of 3 bits, the eleventh in the two bits that are left. KIVI packs 2 and 4 bits
    alike, KVmix 1 to 4.
    """
    shifts = torch.arange(0, 32, bits)
    return (torch.unflatten(codes.long(), -1, (-1, len(shifts))) << shifts).sum(-1).int()


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes ``[..., n]`` int32 of ``pack``."""
    shifts = torch.arange(0, 32, bits)
    unsigned = words.long() & 0xFFFFFFFF
    codes: Tensor = unsigned[..., None] >> shifts & 2**bits - 1
    return codes.flatten(-2).int()
