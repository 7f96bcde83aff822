"""Products with quantized weights: Triton kernels under the interpreter against float64, layouts, and what compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .interpreted import run_cases

pytest.importorskip("triton")

from qkv_engine.kernels.linear import integer
from qkv_engine.kernels.linear.bulk import BulkTuning, bulk_codes_kernel, tile_ranges
from qkv_engine.kernels.linear.code_sum import code_sum_kernel
from qkv_engine.kernels.linear.codes import IntegerWeight
from qkv_engine.kernels.linear.integer import bulk_tuning, code_tuning, code_variant
from qkv_engine.kernels.linear.packed import PackedCodes, pack, unpack
from studies.kernels.compiled import code_kernels, compile_kernel, describe

from .linear_codes_cases import float8_weight, integer_weight


def test_linear_codes_cases() -> None:
    figures = run_cases(Path(__file__).with_name("linear_codes_cases.py"))
    equal = ("gated", "written out", "equal")  # bit for bit
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= (not n.startswith(equal)))}
    assert len(figures) == 208 and not wrong, wrong


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size", "group"), [(96, 32), (192, 64), (256, 128), (80, 80), (1104, 1104)])
def test_layouts_are_undone(bits: int, size: int, group: int) -> None:
    weight = integer_weight(5, size, bits, group, torch.float16, zeros=bits == 4, order=True)
    packed = pack(weight)
    assert packed.shape == weight.shape == (5, size)
    found = unpack(packed)
    assert all(a is b or (torch.equal(a, b) and a.dtype == b.dtype) for a, b in zip(found, weight, strict=True))


def test_floats_are_kept() -> None:
    weight = float8_weight(130, 272, blocks=True)
    assert pack(weight).is_blockwise and unpack(pack(weight)).codes is weight.codes


def weight_of(num_out: int, size: int, bits: int, group: int) -> PackedCodes:
    """A weight without memory."""
    with torch.device("meta"):
        scales = torch.empty(num_out, size // group, dtype=torch.bfloat16)
        dtype = torch.int8 if bits == 8 else torch.uint8
        return pack(IntegerWeight(torch.empty(num_out, size * bits // 8, dtype=dtype), scales))


@pytest.mark.parametrize(
    ("num_out", "size", "bits", "of_8_rows", "of_16_rows"),
    [  # rows of the weight, slices, spans, warps, stages and splits of a tile
        (4096, 4096, 4, (16, 4, 4, 4, 3, 1), (32, 4, 2, 4, 4, 1)),
        (4096, 12288, 4, (16, 4, 4, 4, 3, 1), (32, 1, 2, 2, 5, 4)),
        (6144, 4096, 4, (16, 4, 2, 4, 4, 1), (32, 1, 2, 2, 5, 2)),
        (24576, 4096, 4, (32, 1, 4, 2, 3, 1), (32, 1, 2, 2, 4, 1)),
        (4096, 4096, 8, (32, 4, 2, 4, 4, 1), (32, 4, 2, 4, 4, 1)),
        (4096, 12288, 8, (32, 4, 2, 4, 4, 1), (32, 4, 2, 4, 4, 1)),
        (6144, 4096, 8, (16, 4, 1, 4, 4, 1), (64, 1, 2, 2, 3, 4)),
        (24576, 4096, 8, (16, 4, 1, 4, 4, 1), (32, 1, 2, 2, 3, 1)),
    ],
)
def test_tiles_of_few_rows_are_those_that_were_fastest(num_out, size, bits, of_8_rows, of_16_rows) -> None:
    weight = weight_of(num_out, size, bits, 128 if bits == 4 else size)
    for num_rows, tile in ((8, of_8_rows), (16, of_16_rows)):
        tuning = code_tuning(weight, num_rows, large=True)
        _, found, num_warps = code_variant(weight, num_rows, tuning=tuning)
        sizes = tuple(found[name] for name in ("BLOCK_N", "SLICES", "SPANS"))
        assert (*sizes, num_warps, found["STAGES"], found["SPLITS"]) == tile


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("case", code_kernels(large=False), ids=lambda case: case[0])
def test_tiles_fit_in_smaller_cards(case, capability: int) -> None:
    name, kernel, constexprs, tuning = case
    found = describe(compile_kernel(kernel, constexprs | {"OVERLAP": capability >= 90}, tuning, capability))
    assert found["spilled"] <= (64 if name.startswith("int4 64 rows") else 16)
    assert found["shared"] <= 99 << 10 and (found["HMMA"] or kernel is code_sum_kernel)


def test_bulk_copies_are_for_hopper(monkeypatch) -> None:
    def rows_of_tile(weight: PackedCodes, number: int = 256) -> int | None:
        x = torch.empty(number, weight.num_columns, dtype=torch.bfloat16, device="meta")
        found = bulk_tuning(x, weight)
        return found and found.block_m

    int4, int8 = weight_of(6144, 4096, 4, 128), weight_of(6144, 4096, 8, 4096)
    assert rows_of_tile(int4) is None
    monkeypatch.setattr(integer, "is_hopper", lambda device: True)
    assert [rows_of_tile(int4, number) for number in (32, 33, 64, 65, 128, 129, 256)] == [None, 64, 64, *[128] * 4]
    assert [rows_of_tile(int8, number) for number in (64, 65, 128, 129)] == [None, 128, 128, 256]
    assert rows_of_tile(weight_of(4096, 4096, 8, 4096)) is None
    small, long = (
        bulk_tuning(torch.empty(256, size, device="meta"), weight_of(4096, size, 4, 128)) for size in (4096, 12288)
    )
    assert small is not None and long is not None and small.block_n < long.block_n
    others = weight_of(6144, 4096, 4, 64), weight_of(6144, 4160, 4, 4160), weight_of(6144, 4096, 8, 128)
    assert all(rows_of_tile(other, 128) is None for other in others)


@pytest.mark.parametrize(
    ("num_out", "num_rows", "expected"),
    [
        (24576, 256, [(0, 132, 1), (132, 60, 2)]),
        (6144, 256, [(0, 48, 2)]),
        (4096, 200, [(0, 32, 4)]),
        (4096, 128, [(0, 32, 4)]),
        (2 * 132 * 128, 256, [(0, 264, 1)]),
        (100, 128, [(0, 1, 4)]),
    ],
)
def test_tiles_fill_all_places(num_out, num_rows, expected) -> None:
    tuning = BulkTuning(128, 128, 8, 3, programs=264, splits=4)
    assert list(tile_ranges(tuning, num_rows, num_out, 4096)) == expected


def test_tiles_may_wait_for_tensor_cores_within_a_step() -> None:
    """Before Triton 3.9 registers that tensor cores read from one step to the next could be overwritten."""
    _, kernel, constexprs, tuning = next(case for case in code_kernels() if case[0] == "int4 256 rows gated")
    for waits in (True, False):
        steps = compile_kernel(kernel, constexprs | {"WAITS": waits}, tuning).asm["ttgir"]
        step = steps[steps.index("scf.for") : steps.index("scf.yield")]
        assert ("pendings = 0" in step[step.rindex("warp_group_dot ") :]) == waits


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case[0], marks=pytest.mark.slow if "gated" in case[0] or index % 4 else ())
        for index, case in enumerate(code_kernels())
    ],
)
def test_codes_become_floats_in_registers(case) -> None:
    """Nothing spills, codes of slices are read 16 bytes at a time, and no instruction converts one element.

    Scales of groups are copied ahead in words: a step that loads them waits for the copies of later steps.
    """
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
        assert not found["overwritten"]
        if kernel is bulk_codes_kernel:
            assert "cp.async.bulk" in ptx and "cp.async.cg" not in ptx
            return
        copies = set(re.findall(r"cp\.async\.(c[ag])\S* .*?, (0x\w+)", ptx))
        words = {("ca", "0x4")} if constexprs["GROUPS"] > 1 and not constexprs["SCALED"] else set()
        assert copies >= words and (constexprs["SLICES"] == 1 or copies == words | {("cg", "0x10")})
