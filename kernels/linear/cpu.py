"""oneDNN with weights reordered once into its blocked layout; 2 to 3 times torch's own product at 8 rows and
more. Small matrices are kept as they were too: for few rows torch's product takes half the time of oneDNN's,
but on AMD's processors, where MKL, which torch calls, takes twice as long.

Uses the operators that torch.compile emits for frozen CPU graphs; where a build of torch lacks them nothing
is packed.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows that the layout is tuned for. They decide the blocking only; every number of rows is correct.
_TUNED_ROWS = 256
SMALL_NBYTES = 2 * 2**20  # of a matrix kept twice; of larger ones oneDNN reads at nine tenths of torch's speed


class PackedWeight(NamedTuple):
    """A weight in oneDNN's layout, which is opaque, and where it is small and float32 ``plain`` too."""

    packed: Tensor
    plain: Tensor | None


def can_pack(weight: Tensor) -> bool:
    """Whether this build and this CPU have a packed product for ``weight``'s dtype and device."""
    return weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and weight.numel() > 0


def pack_weight(weight: Tensor) -> PackedWeight:
    """Weight ``[O, I]`` packed; the caller drops the original, which lives on where it is ``plain``."""
    weight = weight.detach().contiguous()
    is_kept = weight.dtype is torch.float32 and weight.nbytes <= SMALL_NBYTES and FEW_ROWS > 0
    return PackedWeight(reorder(weight), weight if is_kept else None)


def reorder(weight: Tensor) -> Tensor:
    """Weight ``[O, I]`` in oneDNN's layout."""
    out: Tensor = _reorder(weight.detach().contiguous(), _TUNED_ROWS)
    return out


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear`` for a packed weight."""
    if weight.plain is not None and len(x) <= FEW_ROWS:
        return F.linear(x, weight.plain, bias)
    out: Tensor = _product(x, weight.packed, bias, "none", [], "")
    return out


def _is_amd() -> bool:
    """Whether the maker of this machine's processor is AMD, by what the system tells."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return "AuthenticAMD" in platform.processor()


def _packed_dtypes() -> frozenset[torch.dtype]:
    ops = torch.ops.mkldnn
    if not (torch._C._has_mkldnn and hasattr(ops, "_linear_pointwise")):
        return frozenset()
    supported = {torch.float32}
    if ops._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if ops._is_mkldnn_fp16_supported():
        supported.add(torch.float16)
    return frozenset(supported)


FEW_ROWS = 0 if _is_amd() else 2  # most rows of torch's own product; at 4 rows it is no faster any more
_PACKED_DTYPES = _packed_dtypes()
if _PACKED_DTYPES:
    _reorder = torch.ops.mkldnn._reorder_linear_weight.default
    _product = torch.ops.mkldnn._linear_pointwise.default
