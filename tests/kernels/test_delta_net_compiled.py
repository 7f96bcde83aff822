"""Gated delta-net compiled without a GPU: registers, spills and shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qkv_engine.kernels.delta_net import STATE_FORMATS, StateSpec
from qkv_engine.kernels.delta_net.chunk_kernels import chunk_scan_kernel
from qkv_engine.kernels.delta_net.triton import MAX_STAGED_KEYS, chunk_scan_variant, has_whole_heads
from qkv_engine.kernels.nvidia import LARGE_SHARED_NBYTES
from studies.kernels.compiled import Tuning, compile_kernel, delta_net_kernels, describe

SPILLED = {"chunk_scan": 160, "chunk_solve": 128}  # bytes; without shared memory for stages operands wait in registers


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("narrow", "number"), [(False, 8), pytest.param(True, 13, marks=pytest.mark.slow)])
def test_kernels_fit_in_registers_and_shared_memory(capability: int, narrow: bool, number: int) -> None:
    """Those of states in float32 alone, or those of narrower ones beside them."""
    names = set()
    for name, kernel, constexprs, tuning in delta_net_kernels(overlap=capability >= 90, large=capability == 90):
        if "/48" in name or narrow != ("int" in name or "mixed" in name):
            continue
        found = describe(compile_kernel(kernel, constexprs, tuning, capability))
        most = next((most for part, most in SPILLED.items() if part in name), 0)
        assert found["spilled"] <= most and found["shared"] <= (
            LARGE_SHARED_NBYTES if capability == 90 else 96 << 10
        ), name
        if "step" in name:
            least = 2 if "whole" in name else 4
            assert found["registers"] * tuning.num_warps <= 2048 // least, f"{name}: a multiprocessor holds fewer"
        names.add(name)
    assert len(names) == number


def test_a_state_is_read_once_all_before_the_convolution_has_ended() -> None:
    """The convolution lets the step start after its own wait, and the step reads all but its results before its.

    What was written right before the convolution is read past L1.
    """
    ptx = {
        name.removeprefix("delta_net "): compile_kernel(kernel, constexprs, tuning).asm["ptx"]
        for name, kernel, constexprs, tuning in delta_net_kernels()
        if "step" in name and "int" not in name and "mixed" not in name and "/48" not in name
    }
    before, _ = ptx.pop("conv_step 16/32").split("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in before and len(ptx) == 2
    for name, text in ptx.items():
        before, behind = text.split("griddepcontrol.wait")
        assert before.count("ld.global.v4") >= 8 > behind.count("ld.global.v4") and "st.global" not in before
        assert before.count("ld.global.cg") == (3 if "whole" in name else 2) and "ld.global.cg" not in behind


def test_whole_heads_are_for_many_that_fit_registers() -> None:
    """A request has 32 heads."""
    spec = StateSpec(num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, conv_width=4)
    assert [has_whole_heads(spec, number) for number in (1, 3, 4, 64)] == [False, False, True, True]
    narrower = tuple(STATE_FORMATS[name] for name in ("int16", "int8"))
    assert [has_whole_heads(spec._replace(narrower=narrower[:number]), 64) for number in (1, 2)] == [True, False]
    assert has_whole_heads(spec._replace(k_dim=80, v_dim=90), 4)
    assert not has_whole_heads(spec._replace(v_dim=129), 64)


def test_wide_keys_fit_in_shared_memory() -> None:
    spec = StateSpec(num_k_heads=1, num_v_heads=1, k_dim=MAX_STAGED_KEYS + 28, v_dim=122, conv_width=2)
    constexprs, num_warps = chunk_scan_variant(spec, torch.bfloat16, large=True)
    found = describe(compile_kernel(chunk_scan_kernel, constexprs, Tuning(num_warps, constexprs["STAGES"]), 90))
    assert found["shared"] <= LARGE_SHARED_NBYTES
