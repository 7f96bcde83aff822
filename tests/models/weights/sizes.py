"""Bytes of loaded weights."""

from __future__ import annotations

from torch import nn

from qkv_engine.kernels.linear import packed_nbytes
from qkv_engine.kernels.moe import CodedExperts
from qkv_engine.models.layers import QuantizableLayer


def held_nbytes(net: nn.Module) -> int:
    """Of parameters, and of the containers that stand in for some, as kernels read them; shared ones count once."""
    total = sum(each.nbytes for each in net.parameters())
    for layer in net.modules():
        for name in ("weight", "gate_up", "down") if isinstance(layer, QuantizableLayer) else ():
            held = getattr(layer, name, None)
            if held is not None and not isinstance(held, nn.Parameter):
                total += packed_nbytes(held.weight if isinstance(held, CodedExperts) else held)
    return total
