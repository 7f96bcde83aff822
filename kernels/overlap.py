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

from .nvidia import is_nvidia


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    is_compiled = is_nvidia(device) and not triton.knobs.runtime.interpret
    return is_compiled and torch.cuda.get_device_capability(device) >= (9, 0)


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


@triton.jit
def begin_in_chain(IS_FIRST: tl.constexpr, OVERLAP: tl.constexpr):
    """Begins one of several kernels in a row that read the same, and nothing that another of them writes.

    Before ``wait_in_chain`` it may read what was written before launches began to overlap, such as a step's plan.
    """
    if not IS_FIRST:
        let_next_start(OVERLAP)


@triton.jit
def wait_in_chain(IS_FIRST: tl.constexpr, OVERLAP: tl.constexpr):
    """The first kernel waits, then lets the next start, so that the others need no wait but at their end.

    What was written right before the first they load past L1, which may hold what lay there before.
    """
    if IS_FIRST:
        wait_for_previous(OVERLAP)
        let_next_start(OVERLAP)


@triton.jit
def wait_in_loop(pointer, IS_FIRST: tl.constexpr, OVERLAP: tl.constexpr):
    """``pointer`` after ``wait_in_chain``, within a loop: what it fetches ahead begins before the wait.

    That is assembly, since compilers fetch nothing ahead over the operations.
    """
    if IS_FIRST and OVERLAP:
        WAIT: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;"
        zero = tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        pointer += 16 * zero  # its alignment stays known
    return pointer


@triton.jit
def after_previous(pointer, OVERLAP: tl.constexpr):
    """``pointer`` after ``wait_for_previous``, for loads by inline assembly that could otherwise move before the wait.

    That is assembly without side effects: only operands order it.
    """
    wait_for_previous(OVERLAP)
    if OVERLAP:
        ZERO: tl.constexpr = "mov.u32 $0, 0;"
        pointer += tl.inline_asm_elementwise(ZERO, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return pointer
