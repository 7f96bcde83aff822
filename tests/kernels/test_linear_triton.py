"""Products of few rows: Triton kernels under the interpreter against float64, and which products they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear.steady_triton import FLOAT32_TILE, steady_tile
from qkv_engine.kernels.linear.triton import MAX_ROWS, NARROW, NARROW_TILES, TILES, can_stream
from studies.kernels.compiled import compile_kernel, describe, linear_kernels


def test_linear_cases() -> None:
    figures = run_cases(Path(__file__).with_name("linear_cases.py"))
    equal = ("alone", "gated")  # bit for bit
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= (not n.startswith(equal)))}
    assert len(figures) == 46 and not wrong


def test_other_products_are_torchs() -> None:
    x, weight = torch.zeros(MAX_ROWS, 80, dtype=torch.bfloat16), torch.zeros(16, 80, dtype=torch.bfloat16)
    assert can_stream(x, weight) and can_stream(x[:1], weight) and can_stream(x.half(), weight.half())
    many = torch.zeros(MAX_ROWS + 1, 80, dtype=torch.bfloat16)
    others = x[:0], many, x[:, :72], x[:, :79].contiguous(), x.float(), x.clone().requires_grad_()
    assert not any(can_stream(other, weight) for other in others)
    assert not can_stream(x, weight.requires_grad_())


def test_tiles_sum_in_whole_matrix_instructions() -> None:
    """Sixteen columns at a time, in their order, whatever the tile: so the tile changes no bit of a steady product."""
    assert all(tile.block_k % 16 == 0 for tile in (*TILES.values(), *NARROW_TILES.values()))
    assert {steady_tile(number, NARROW, 4) for number in (1, 64, 1000)} == {FLOAT32_TILE}
    assert [steady_tile(number, NARROW + 1, 2) for number in (1, 9, 1000)] == [TILES[8], TILES[16], TILES[128]]
    assert steady_tile(64, NARROW, 2) == NARROW_TILES[64] != steady_tile(64, NARROW + 1, 2)


@pytest.mark.parametrize("case", linear_kernels(), ids=lambda case: case[0])
def test_weights_stream(case) -> None:
    """Next to nothing spills, and weights are read 16 bytes at a time, by sums all of them before waiting for ``x``."""
    name, kernel, constexprs, tuning = case
    built = compile_kernel(kernel, constexprs, tuning)
    found = describe(built)
    assert found["spilled"] <= 16 and found["registers"] <= 160
    ptx = built.asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait")
    if "tile" in name:
        assert (found["HMMA"] or found["HGMMA"]) and "ld.global" not in ptx
        assert "cp.async.cg" in after and "cp.async.ca" not in ptx  # 16 bytes; the other kind may be fewer
    else:
        loads = constexprs["BLOCK_N"] * -(-constexprs["K"] // constexprs["BLOCK_K"])
        assert before.count("ld.global") == before.count("v4.b32") == loads


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("case", [case for case in linear_kernels() if "tile" in case[0]], ids=lambda case: case[0])
def test_tiles_fit_in_smaller_cards(case, capability: int) -> None:
    _, kernel, constexprs, tuning = case
    found = describe(compile_kernel(kernel, constexprs | {"OVERLAP": capability >= 90}, tuning, capability))
    assert found["spilled"] <= 16 and found["shared"] <= 99 << 10 and found["HMMA"]
