"""Products with quantized weights: Triton kernels under the interpreter against float64, layouts, and what compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear.code_sum import code_sum_kernel
from qkv_engine.kernels.linear.packed import pack, unpack
from studies.kernels.compiled import code_kernels, compile_kernel, describe

from .linear_codes_cases import float8_weight, integer_weight


def test_linear_codes_cases() -> None:
    figures = run_cases(Path(__file__).with_name("linear_codes_cases.py"))
    equal = ("gated", "written out", "equal")  # bit for bit
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= (not n.startswith(equal)))}
    assert len(figures) == 173 and not wrong


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size", "group"), [(96, 32), (192, 64), (256, 128), (80, 80), (1104, 1104)])
def test_layouts_are_undone(bits: int, size: int, group: int) -> None:
    weight = integer_weight(5, size, bits, group, torch.float16, zeros=bits == 4, order=True)
    packed = pack(weight)
    assert packed.shape == weight.shape == (5, size)
    found = unpack(packed)
    assert torch.equal(found.codes, weight.codes) and found.codes.dtype == weight.codes.dtype
    assert found[1:] == weight[1:]


def test_floats_are_kept() -> None:
    weight = float8_weight(130, 272, blocks=True)
    assert pack(weight).is_blockwise and unpack(pack(weight)).codes is weight.codes


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case[0], marks=pytest.mark.slow if "gated" in case[0] or index % 2 else ())
        for index, case in enumerate(code_kernels())
    ],
)
def test_codes_become_floats_in_registers(case) -> None:
    """Nothing spills, codes of slices are read 16 bytes at a time, and no instruction converts one element."""
    _, kernel, constexprs, tuning = case
    built = compile_kernel(kernel, constexprs, tuning)
    found, ptx = describe(built), built.asm["ptx"]
    assert found["spilled"] <= 16 and not {"I2F", "I2FP", "F2F"} & set(found["mix"])
    if kernel is code_sum_kernel:
        before, _ = ptx.split("griddepcontrol.wait")
        vectors = constexprs["K"] // (32 if constexprs["KIND"] == "int4" else 16)
        loads = constexprs["BLOCK_N"] * -(-vectors // constexprs["BLOCK_Q"])
        assert before.count("v4.b32") == loads and "ld.global.v2.b32" not in before
    else:
        assert found["HMMA"] or found["HGMMA"]
        assert constexprs["SLICES"] == 1 or ("cp.async.cg" in ptx and "cp.async.ca" not in ptx)
