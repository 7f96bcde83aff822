"""Sign sides, the worked example of ``docs/adding_a_format.md``: a bit a channel, the mean of eight absolute values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv_engine.kernels.formats.family import Family, Side, TorchOps, TritonOps, plain_cpu_ops

from .layout import Sign, SignSide
from .presets import CANDIDATES, PRESETS

if TYPE_CHECKING:
    import torch


def _formats(dtype: torch.dtype) -> dict[str, Sign]:
    return {Sign.name: Sign()}


def _check_step(old: Side, new: SignSide) -> None:
    raise ValueError("sign sides are sealed from dense ones alone")


def _torch_ops() -> TorchOps:
    from .reference import demote, dequantize, quantize

    return TorchOps(quantize, dequantize, demote, plain_cpu_ops(quantize, dequantize, demote))


def _triton() -> TritonOps:
    from .triton import SIGN_TRITON

    return SIGN_TRITON


SIGN = Family("sign", _formats, _check_step, _torch_ops, _triton, presets=PRESETS, candidates=CANDIDATES)
SignSide.family = SIGN
