"""Launches that overlap: a kernel starts while the one before it in the stream still runs (Hopper and later).

Launched with ``launch_pdl``, a kernel starts once every program of the one before has begun. Each kernel of a chain
waits for the one before, at its end at the latest, so what any of them wrote may be read after a wait.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0) and not triton.knobs.runtime.interpret


@cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that may begin before its predecessor in the stream has ended, where possible.

    The predecessor must not write anything that this kernel reads before ``wait_for_previous``.
    """
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Lets the next kernel in the stream start."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Waits until every kernel before this one has ended and its writes are visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
