"""Products of few rows: Triton kernels under the interpreter against float64, and which products they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear import triton as linear_triton
from qkv_engine.kernels.linear.steady_triton import FLOAT32_TILE, steady_tile
from qkv_engine.kernels.linear.triton import ANY, MAX_ROWS, TILES, can_split, can_stream, is_faster, split_tile, tile_of
from qkv_engine.kernels.nvidia import LARGE_SHARED_NBYTES
from studies.kernels.compiled import compile_kernel, describe, linear_kernels


def test_linear_cases() -> None:
    figures = run_cases(Path(__file__).with_name("linear_cases.py"))
    equal = ("alone", "gated", "equal")  # bit for bit
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= (not n.startswith(equal)))}
    assert len(figures) == 86 and not wrong


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
    assert tile_of(num_rows, num_out) == (*tile, 1)


@pytest.mark.parametrize(
    ("num_rows", "num_out", "size", "tile"),
    [
        (16, 2560, 4096, (16, 64, 128, 4, 4, 4)),
        (9, 2560, 9216, (16, 64, 128, 4, 6, 3)),
        (16, 4096, 12288, (16, 64, 128, 4, 6, 2)),
        (32, 2560, 4096, (32, 64, 128, 4, 4, 4)),
        (17, 2560, 9216, (32, 64, 128, 4, 5, 3)),
        (32, 4096, 4096, (32, 64, 128, 4, 4, 2)),
        (32, 4096, 12288, (32, 64, 128, 4, 5, 2)),
        (33, 2560, 4096, (64, 64, 128, 4, 3, 4)),
        (64, 2560, 9216, (64, 64, 128, 4, 5, 3)),
        (64, 4096, 4096, (64, 64, 128, 4, 3, 2)),
        (64, 4096, 12288, (64, 64, 128, 4, 5, 2)),
    ],
)
def test_splits_are_those_that_were_fastest(num_rows: int, num_out: int, size: int, tile: tuple[int, ...]) -> None:
    assert split_tile(num_rows, num_out, size) == tile


def test_other_products_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few or many rows, of parts of tiles or steps, of many rows of the weight, with gradients, on a CPU."""
    assert all(split_tile(number, 2560, 4096) is None for number in (0, 1, 8, MAX_ROWS + 1))
    assert all(split_tile(16, *shape) is None for shape in ((4160, 4096), (2592, 4096), (2560, 4160), (2560, 128)))
    x, weight = torch.zeros(16, 4096, dtype=torch.bfloat16), torch.zeros(2560, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not can_split(x, weight)
        monkeypatch.setattr(linear_triton, "has_large_shared", lambda device: True)
        assert can_split(x, weight) and can_split(x.half(), weight.half())
        assert not can_split(x.float(), weight) and not can_split(x.T.contiguous().T, weight)
    assert not can_split(x, weight)


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
    assert found["spilled"] <= 16 and found["registers"] <= 160 and found["shared"] <= LARGE_SHARED_NBYTES
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
@pytest.mark.parametrize(
    "case", [case for case in linear_kernels(large=False) if "tile" in case[0]], ids=lambda case: case[0]
)
def test_tiles_fit_in_smaller_cards(case, capability: int) -> None:
    _, kernel, constexprs, tuning = case
    found = describe(compile_kernel(kernel, constexprs | {"OVERLAP": capability >= 90}, tuning, capability))
    assert found["spilled"] <= 16 and found["shared"] <= 99 << 10 and found["HMMA"]
