"""Experts with quantized weights: Triton kernels under the interpreter against the reference, and what compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear import dequantize
from qkv_engine.kernels.linear.packed import can_pack, pack, unpack
from qkv_engine.kernels.moe.codes import TUNINGS, PairTiles, SortedTiles, can_multiply, choose_tuning
from qkv_engine.kernels.nvidia import LARGE_SHARED_NBYTES
from studies.kernels.compiled import coded_experts_kernels, compile_kernel, describe

from .moe_codes_cases import make_experts, make_weight, packed

BOUNDS = {"equal": 0.0, "fp16": 1e-3, "bf16": 4e-3}
SHARED_NBYTES = {80: 163 << 10, 90: LARGE_SHARED_NBYTES, 120: 99 << 10}  # a program's at most, by compute capability


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_moe_codes_cases(slow: bool) -> None:
    figures = run_cases(Path(__file__).with_name("moe_codes_cases.py"), slow=slow)
    bounds = {name: next(bound for part, bound in BOUNDS.items() if name.startswith(part)) for name in figures}
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= bounds[n])}
    assert len(figures) == (57 if slow else 25) and not wrong, wrong


@pytest.mark.parametrize("size", [32, 64, 96, 2880])
def test_the_layout_of_4_bit_floats_is_undone(size: int) -> None:
    weight = make_weight("float4", 5, size, torch.bfloat16)
    found = pack(weight)
    assert (found.kind, found.bits, found.shape, found.group) == ("float4", 4, (5, size), 32)
    assert all(map(torch.equal, unpack(found)[:2], weight)) and found.scales.stride(0) % 4 == 0
    assert torch.equal(dequantize(found, torch.float32), dequantize(weight, torch.float32))


def test_large_powers_stay_unpacked() -> None:
    """Those that bfloat16 cannot make up for: packed codes have scales of at most 2."""
    weight = make_weight("float4", 3, 96, torch.bfloat16)
    weight.scales[1, 1] = 128
    assert can_pack(weight)
    weight.scales[1, 1] = 129
    assert not can_pack(weight)


def test_halves_of_a_span_have_scales_of_their_own() -> None:
    """By hand: 1 at columns 0, 32, 33 and 95, the last in a span that is not full; then -6 and -0.5 side by side."""
    codes = torch.zeros(1, 48, dtype=torch.uint8)
    for column in (0, 32, 33, 95):
        codes[0, column // 2] |= 2 << 4 * (column % 2)
    found = pack(make_weight("float4", 1, 96, torch.bfloat16)._replace(codes=codes)).codes.view(2, 32)
    assert found.nonzero().tolist() == [[0, 0], [0, 1], [1, 31]]
    assert found[found > 0].tolist() == [0x22 << 1, 0x20 << 1, 0x02 << 1]
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0], codes[0, 16] = 0x0F, 0x09
    found = pack(make_weight("float4", 1, 64, torch.bfloat16)._replace(codes=codes)).codes
    assert found.nonzero().tolist() == [[0, 0]] and int(found[0, 0]) == 0b1_01_1111_0


def test_what_the_kernels_take() -> None:
    """Packed codes of both matrices and 16-bit activations; anything else is written out."""
    x, experts = torch.zeros(1, 96, dtype=torch.bfloat16), make_experts("float4", 3, 96, 32, torch.bfloat16)
    assert can_multiply(x, packed(experts)) and not can_multiply(x, experts)
    assert not can_multiply(x.float(), packed(experts))
    assert not can_multiply(x, packed(experts)._replace(down=torch.zeros(3, 96, 32)))


def test_tunings_serve_every_number() -> None:
    for bits, tunings in TUNINGS.items():
        assert isinstance(choose_tuning(1, 4, 8, bits), PairTiles)
        assert isinstance(choose_tuning(10**6, 4, 32, bits), SortedTiles)
        assert list(tunings) == sorted(tunings) and list(tunings)[-1] == float("inf")


@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(120, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case[0], marks=() if index % 8 == 0 else pytest.mark.slow)
        for index, case in enumerate(coded_experts_kernels())
    ],
)
def test_codes_become_floats_in_registers(case, capability: int, report: list[str]) -> None:
    """Next to nothing spills, and nothing is overwritten.

    Codes pass shared memory once, and their floats where elements are scaled.
    """
    name, kernel, constexprs, tuning = case
    built = compile_kernel(kernel, constexprs | {"OVERLAP": capability >= 90}, tuning, capability)
    found, steps = describe(built), built.asm["ttgir"]
    step = steps[steps.index("scf.for") : steps.index("scf.yield")]
    report.append(f"{name}, sm_{capability}: {found['registers']} registers, {found['shared']} shared")
    assert found["spilled"] <= (16 if capability == 90 else 64)
    assert found["shared"] <= SHARED_NBYTES[capability] and (found["HMMA"] or found["HGMMA"])
    assert not found["overwritten"]
    tile = r"\d+x" * (2 if constexprs["SLICES"] == 1 else 3)  # scales have a dimension less
    assert not re.search(rf"convert_layout .*tensor<{tile}\w+, #blocked", step)
    passes = constexprs["SCALED"] and constexprs["KIND"] == "int4"
    assert step.count("local_alloc") == 2 * constexprs["SPANS"] * passes
