"""States rewritten in a narrower format, at other places of a byte arena."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import StateFormat, narrow
from .state import StateSpec, StateViews


def narrow_states(
    memory: Tensor, src: Tensor, dst: Tensor, spec: StateSpec, new: StateFormat, dtype: torch.dtype, finite: Tensor
) -> None:
    """Writes the states at ``src``, of ``spec`` in a model that computes in ``dtype``, at ``dst`` in format ``new``.

    Shapes:  memory [bytes] uint8;  src, dst [n] int64, addresses of slots, none of which overlap;
             finite [n] int64, ones: 0 is written for a state in float32 whose elements are not all finite
    """
    if memory.is_cuda:
        from .triton import narrow_states_triton

        return narrow_states_triton(memory, src, dst, spec, new, dtype, finite)
    target = spec._replace(format=new)
    for i, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        stored, conv = StateViews.of(memory[a : a + spec.nbytes(dtype)], spec, dtype)
        views = StateViews.of(memory[b : b + target.nbytes(dtype)], target, dtype)
        made = StateViews(narrow(stored, spec.format, new), conv)
        for view, part in zip(views.parts(), made.parts(), strict=True):
            view.copy_(part)
        if stored.scales is None and not stored.elements.isfinite().all():
            finite[i] = 0
    return None
