"""Sign sides, the worked example of ``docs/adding_a_format.md``: a bit a channel, the mean of eight absolute values."""

from __future__ import annotations

import torch

from qkv_engine.kernels.formats.family import Family, Side, TritonOps, plain_cpu_ops

from .layout import Sign, SignSide
from .reference import demote, dequantize, quantize


def _formats(dtype: torch.dtype) -> dict[str, Sign]:
    return {Sign.name: Sign()}


def _check_step(old: Side, new: SignSide) -> None:
    raise ValueError("sign sides are sealed from dense ones alone")


def _triton() -> TritonOps:
    from .triton import SIGN_TRITON

    return SIGN_TRITON


SIGN_CPU = plain_cpu_ops(quantize, dequantize, demote)
SIGN = Family("sign", _formats, _check_step, quantize, dequantize, demote, SIGN_CPU, _triton)
SignSide.family = SIGN
