"""Products of few rows: Triton kernels under the interpreter against float64, and which products they take."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear.steady_triton import WIDE_OUT, linear_steady_kernel, steady_variant
from qkv_engine.kernels.linear.triton import MAX_ROWS, can_stream
from qkv_engine.kernels.paged_decode.triton import Tuning
from studies.kernels.compiled import compile_kernel, describe, linear_kernels


def test_linear_cases() -> None:
    figures = run_cases(Path(__file__).with_name("linear_cases.py"))
    equal = ("alone", "gated")  # bit for bit
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= (not n.startswith(equal)))}
    assert len(figures) == 44 and not wrong


def test_other_products_are_torchs() -> None:
    x, weight = torch.zeros(MAX_ROWS, 80, dtype=torch.bfloat16), torch.zeros(16, 80, dtype=torch.bfloat16)
    assert can_stream(x, weight) and can_stream(x[:1], weight) and can_stream(x.half(), weight.half())
    many = torch.zeros(MAX_ROWS + 1, 80, dtype=torch.bfloat16)
    others = x[:0], many, x[:, :72], x[:, :79].contiguous(), x.float(), x.clone().requires_grad_()
    assert not any(can_stream(other, weight) for other in others)
    assert not can_stream(x, weight.requires_grad_())


def test_a_weight_alone_decides_on_the_tile() -> None:
    """Of a deterministic product: nothing that a kernel is compiled with is the number of rows."""
    names = inspect.signature(steady_variant).parameters
    assert list(names) == ["num_out", "size", "itemsize", "tuning"]
    assert steady_variant(WIDE_OUT, 64, 2)[0]["BLOCK_N"] == 64 and steady_variant(4096, 64, 2)[0]["BLOCK_N"] == 32


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("num_out", [4096, pytest.param(24576, marks=pytest.mark.slow)])
def test_steady_products_fit_in_registers_and_shared_memory(num_out: int, capability: int) -> None:
    constexprs, num_warps = steady_variant(num_out, 4096, 2)
    constexprs |= {"OVERLAP": capability >= 90, "bias_ptr": None}
    found = describe(
        compile_kernel(linear_steady_kernel, constexprs, Tuning(num_warps, constexprs["STAGES"]), capability)
    )
    assert found["spilled"] <= 16 and found["shared"] <= 99 << 10
    assert found["HMMA"] or found.get("HGMMA")


@pytest.mark.parametrize("case", linear_kernels(), ids=lambda case: case[0])
def test_weights_stream(case) -> None:
    """Next to nothing spills, and weights are read 16 bytes at a time, by sums all of them before waiting for ``x``."""
    name, kernel, constexprs, tuning = case
    built = compile_kernel(kernel, constexprs, tuning)
    found = describe(built)
    assert found["spilled"] <= 16 and found["registers"] <= 128
    ptx = built.asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait")
    if "tile" in name:
        assert found["HMMA"] and "ld.global" not in ptx
        assert "cp.async.cg" in after and "cp.async.ca" not in ptx  # 16 bytes; the other kind may be fewer
    else:
        loads = constexprs["BLOCK_N"] * -(-constexprs["K"] // constexprs["BLOCK_K"])
        assert before.count("ld.global") == before.count("v4.b32") == loads
