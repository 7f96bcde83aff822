"""Products of few rows: Triton kernels under the interpreter against float64, and which products they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear.steady_triton import FLOAT32_TILE, steady_tile
from qkv_engine.kernels.linear.triton import ANY, MAX_ROWS, TILES, can_stream, is_faster, tile_of
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


@pytest.mark.parametrize(
    ("num_out", "size", "most"),
    [
        (12352, 2560, 64),
        (6144, 2560, 64),
        (2560, 4096, 64),
        (18432, 2560, 32),
        (248320, 2560, 32),
        (6144, 8192, 32),
        (2560, 9216, 16),
        (4096, 12288, 16),
    ],
)
def test_products_of_most_rows_that_were_faster_than_torchs(num_out: int, size: int, most: int) -> None:
    assert all(is_faster(number, num_out, size) == (0 < number <= most) for number in range(2 * MAX_ROWS))


@pytest.mark.parametrize(
    ("num_rows", "num_out", "tile"),
    [
        (16, 2560, (16, 16, 512, 2, 4)),
        (9, 4096, (16, 16, 512, 2, 4)),
        (16, 6144, (16, 64, 256, 4, 3)),
        (16, 12352, (16, 32, 128, 2, 6)),
        (16, 18432, (16, 32, 128, 2, 6)),
        (16, 24576, (16, 64, 128, 4, 3)),
        (32, 12352, (32, 64, 128, 4, 5)),
        (32, 18432, (32, 64, 128, 4, 3)),
        (64, 2560, (32, 64, 128, 4, 5)),
        (64, 6144, (64, 64, 128, 4, 4)),
        (64, 12352, (64, 64, 128, 4, 3)),
    ],
)
def test_tiles_are_those_that_were_fastest(num_rows: int, num_out: int, tile: tuple[int, ...]) -> None:
    assert tile_of(num_rows, num_out) == tile


def test_tiles_sum_in_whole_matrix_instructions() -> None:
    """Sixteen columns at a time, in their order, whatever the tile: so the tile changes no bit of a steady product."""
    assert all(tile.block_k % 16 == 0 for tiles in TILES.values() for tile in tiles.values())
    assert all(list(tiles) == sorted(tiles) and ANY in tiles for tiles in TILES.values())
    assert {steady_tile(number, 4096, 4) for number in (1, 64, 1000)} == {FLOAT32_TILE}
    assert [steady_tile(number, 30_000, 2) for number in (1, 9, 1000)] == [TILES[n][ANY] for n in (8, 16, 128)]
    assert steady_tile(64, 4096, 2) == TILES[64][4096] != steady_tile(64, 4097, 2)


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
