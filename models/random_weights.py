"""Seeded random weights, in place of a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Set
from concurrent.futures import CancelledError

import torch
from torch import Tensor, nn

from .layers import Norm
from .weights.codes import quantized
from .weights.loading import quantized_matrices

_STD = 0.02  # as transformers initialises weights
_PIECE = 2**24  # elements drawn between two checks of ``stopped``: about 0.2 s of a CPU


def fill_randomly(
    net: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int,
    rank: int,
    split: Set[Tensor],
    stopped: Callable[[], bool],
) -> None:
    """Fills the parameters with the same values on all ranks, but for those in ``split``, of which each has a part.

    A parameter without memory is a matrix that is quantized on load: it is made, filled and quantized before the next
    one. Values do not depend on which have memory.
    """
    norms = {module.weight for module in net.modules() if isinstance(module, Norm)}
    matrices = {getattr(layer, each.attribute): (layer, each) for _, layer, each in quantized_matrices(net)}
    common, own = (torch.Generator(device).manual_seed(number) for number in (seed, seed + rank + 1))
    for parameter in list(net.parameters()):
        values = torch.empty(parameter.shape, dtype=dtype, device=device) if parameter.is_meta else parameter
        for piece in torch.split(values.view(-1), _PIECE):
            if stopped():
                raise CancelledError
            if parameter in norms:
                piece.fill_(1.0)
            else:
                piece.normal_(0.0, _STD, generator=own if parameter in split else common)
        if parameter.is_meta:
            layer, matrix = matrices[parameter]
            layer.hold(matrix.attribute, quantized(layer.format, values.view(matrix.shape), dtype))
