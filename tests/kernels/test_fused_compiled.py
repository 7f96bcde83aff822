"""The small fused kernels compiled for Hopper, which needs no GPU: nothing spills, and rows move 16 bytes at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from studies.kernels.compiled import compile_kernel, describe, fused_kernels

MAX_LOADS = {"rms_norm": 6, "swiglu": 2, "rope_kv_write": 8}  # instructions a thread; bytes one by one would be dozens


@pytest.mark.parametrize("case", fused_kernels(), ids=lambda case: case[0])
def test_fused_kernels_fit_in_registers(case) -> None:
    name, kernel, constexprs, tuning = case
    found = describe(compile_kernel(kernel, constexprs, tuning))
    assert found["spilled"] == 0 and found["registers"] <= 80
    assert found["LDG"] <= next(most for part, most in MAX_LOADS.items() if part in name)
