"""The small fused kernels compiled without a GPU: next to nothing spills; on Hopper rows move 16 bytes at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from qkv_engine.kernels.cos_sin.triton import cos_sin_kernel, cos_sin_variant
from qkv_engine.kernels.paged_decode.triton import Tuning
from studies.kernels.compiled import basis_kernels, compile_kernel, describe, fused_kernels

# Instructions a thread; bytes one by one would be dozens.
MAX_LOADS = {"sums": 22, "rms_norm": 6, "float8 swiglu": 12, "swiglu": 2, "sigmoid_gate": 2, "rope_kv_write": 10}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case[0], marks=pytest.mark.slow if i % 2 else ()) for i, case in enumerate(fused_kernels())],
)
def test_fused_kernels_fit_in_registers(case) -> None:
    name, kernel, constexprs, tuning = case
    found = describe(compile_kernel(kernel, constexprs, tuning))
    assert found["spilled"] == 0 and found["registers"] <= 80
    assert found["LDG"] <= next(most for part, most in MAX_LOADS.items() if part in name)


def test_cosines_are_those_of_any_angle() -> None:
    """The instructions of the device err by as much as the angle is large."""
    constexprs, num_warps = cos_sin_variant(128)
    ptx = compile_kernel(cos_sin_kernel, {**constexprs, "scale_ptr": None}, Tuning(num_warps, 1)).asm["ptx"]
    assert "st.global" in ptx and "cos.approx" not in ptx and "sin.approx" not in ptx


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)]
)
def test_a_basis_fits_in_registers_and_shared_memory(capability) -> None:
    for _, kernel, constexprs, tuning in basis_kernels(128, 256, overlap=capability >= 90):
        found = describe(compile_kernel(kernel, constexprs, tuning, capability))
        assert found["spilled"] <= 16 and found["shared"] <= 48 << 10 and found["HMMA"] > 0
