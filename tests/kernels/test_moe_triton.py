"""Mixture of experts: Triton kernels under the interpreter against the reference, and as compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.moe.triton import TUNINGS, ExpertSums, ExpertTiles, choose_tuning, most_tiles
from studies.kernels.compiled import compile_kernel, describe, moe_kernels

BOUNDS = {"equal": 0.0, "route": 1e-6, "fp32": 1e-6, "fp16": 1e-3, "bf16": 4e-3}


def test_moe_cases() -> None:
    figures = run_cases(Path(__file__).with_name("moe_cases.py"))
    bounds = {name: next(bound for part, bound in BOUNDS.items() if name.startswith(part)) for name in figures}
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= bounds[n])}
    assert len(figures) == 78 and not wrong


def test_tiles_are_bounded() -> None:
    """Without data: one token has a tile an expert, many have about as many as their pairs fill."""
    assert most_tiles(1, 8, 128, 16) == 8
    assert most_tiles(16, 8, 128, 16) == 128
    assert most_tiles(256, 8, 128, 32) == 128 + 1920 // 32
    assert most_tiles(40, 2, 8, 32) == 8 + 72 // 32


def test_tunings_serve_every_number() -> None:
    assert isinstance(choose_tuning(1, 2, 8), ExpertSums) and isinstance(choose_tuning(2, 2, 8), ExpertTiles)
    assert choose_tuning(10**6, 8, 128) == TUNINGS[float("inf")]
    assert list(TUNINGS) == sorted(TUNINGS)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case[0], marks=pytest.mark.slow if index % 2 else ())
        for index, case in enumerate(moe_kernels())
    ],
)
def test_kernels_fit_in_registers(case) -> None:
    """Weights are read 16 bytes at a time: for down sums before waiting for gate and up, for tiles by wide copies."""
    name, kernel, constexprs, tuning = case
    built = compile_kernel(kernel, constexprs, tuning)
    found, ptx = describe(built), built.asm["ptx"]
    assert found["spilled"] == 0 and found["registers"] <= 176
    if "tile" in name:
        assert found["HGMMA"] or found["HMMA"]
        assert "cp.async.cg" in ptx and "cp.async.ca" not in ptx
    if "down_sum" in name:
        before, _ = ptx.split("griddepcontrol.wait")
        assert before.count("ld.global.L1::evict_first") == before.count("v4.b32") >= 12


@pytest.mark.slow
@pytest.mark.parametrize("case", moe_kernels(overlap=False), ids=lambda case: case[0])
def test_kernels_fit_before_hopper(case) -> None:
    found = describe(compile_kernel(*case[1:], capability=80))
    assert found["spilled"] == 0
