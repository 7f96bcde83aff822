"""oneDNN with weights reordered once into its blocked layout; 2 to 3 times torch's own product at 8 rows and
more.

Uses the operators that torch.compile emits for frozen CPU graphs; where a build of torch lacks them nothing
is packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that the layout is tuned for. They decide the blocking only; every number of rows is correct.
_TUNED_ROWS = 256


def can_pack(weight: Tensor) -> bool:
    """Whether this build and this CPU have a packed product for ``weight``'s dtype and device."""
    return weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and weight.numel() > 0


def pack_weight(weight: Tensor) -> Tensor:
    """Weight ``[O, I]`` as an opaque oneDNN tensor; a copy, the caller drops the original."""
    packed: Tensor = _reorder(weight.detach().contiguous(), _TUNED_ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear`` for a packed weight."""
    out: Tensor = _product(x, weight, bias, "none", [], "")
    return out


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


_PACKED_DTYPES = _packed_dtypes()
if _PACKED_DTYPES:
    _reorder = torch.ops.mkldnn._reorder_linear_weight.default
    _product = torch.ops.mkldnn._linear_pointwise.default
