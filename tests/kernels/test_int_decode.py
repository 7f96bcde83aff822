"""The integer decode kernel: right for every width, axis and group (interpreter), and what Hopper gets of it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from qkv_engine.kernels.formats import BlockLayout
from qkv_engine.kernels.formats.family import PageShape
from qkv_engine.kernels.formats.uniform.integer import integer_functions
from qkv_engine.kernels.formats.uniform.layout import Axis, SideName, Uniform
from qkv_engine.kernels.paged_decode.int_kernel import decode_int_kernel
from qkv_engine.kernels.paged_decode.triton import DEEP_TUNING, Tuning, decode_variant, integer_tuning
from studies.kernels.compiled import compile_kernel, describe
from studies.kernels.inputs import pattern_page, uniform_page

from . import int_decode_cases as cases
from .interpreted import run_cases

LIMIT = 2e-3  # relative; queries and weights are 16-bit fixed point


def test_equals_float_attention() -> None:
    figures = run_cases(cases.__file__)
    wrong = {name: figure for name, figure in figures.items() if not isinstance(figure, float) or not figure <= LIMIT}
    assert len(figures) > 60 and not wrong


@pytest.mark.parametrize(
    ("side", "axis", "group", "is_integer"),
    [
        ("k", "channel", 32, True),
        ("k", "token", 128, True),
        ("k", "token", 64, False),
        ("v", "token", 32, True),
        ("v", "channel", 128, True),
        ("v", "channel", 64, False),
    ],
)
def test_sides_that_integer_dots_serve(side: SideName, axis: Axis, group: int, is_integer: bool) -> None:
    layout = Uniform(4, axis, group).layout(PageShape(2, 128, 128), side)
    assert (integer_functions(layout) is not None) == is_integer


def test_pages_of_another_size_are_not_integer() -> None:
    assert integer_functions(Uniform(4, "channel", 128).layout(PageShape(2, 256, 128), "k")) is None


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "group"),
    [(4, 4, 128), *(pytest.param(*bits, marks=pytest.mark.slow) for bits in ((3, 1, 128), (2, 2, 32)))],
)
def test_every_byte_of_a_page_is_fetched_ahead_and_once(k_bits: int, v_bits: int, group: int) -> None:
    k, v = cases.sides(k_bits, v_bits, 128, "channel", group, group, heads=8)
    arguments = cases.constexprs(k, v, 4)
    tuning = integer_tuning(BlockLayout.stack([k, v]).pages[0], 4, arguments["TILES"])
    options = {**arguments, "STAGES": 4, "OVERLAP": True}  # 4 stages hold one page
    built = compile_kernel(decode_int_kernel, options, Tuning(tuning.num_warps, 4))
    found = describe(built)
    head_nbytes = sum(s.head_codes_nbytes + s.head_meta_nbytes for s in (k, v))
    assert "tt.load" not in built.asm["ttgir"].split("scf.for", 1)[1]
    assert found["spilled"] == 0 and found["shared"] <= head_nbytes + 2048


def test_first_pages_are_under_way_before_the_wait() -> None:
    """Pages of codes were written before launches began to overlap, queries by the kernel before."""
    arguments = cases.constexprs(*cases.sides(4, 4, 128, "channel", 128, 128, heads=8), 4)
    options = {**arguments, "STAGES": DEEP_TUNING[1], "OVERLAP": True, "EARLY": True, "IS_FIRST": True}
    built = compile_kernel(decode_int_kernel, options, Tuning(*DEEP_TUNING))
    before, behind = built.asm["ptx"].split("griddepcontrol.wait", 1)
    assert "ld.global.cg.v4" in behind  # the query, by loads of 16 bytes
    page_nbytes = 2 * 128 * 128 // 2
    assert before.count("cp.async.cg") * 16 * 32 * DEEP_TUNING[0] >= 2 * page_nbytes
    found = describe(built)
    assert found["spilled"] == 0 and found["shared"] <= 37 << 10  # six programs a multiprocessor of Hopper


def test_few_items_of_four_bits_have_more_pages_under_way() -> None:
    def tunings(*page: int, bank: bool = False) -> list[tuple[int, int]]:
        layout = pattern_page(page[0], 32, 8, 128) if bank else uniform_page(page[:2], 8, page[2])
        found = (decode_variant(layout, 4, sink_tokens=0, is_deep=is_deep)[2] for is_deep in (False, True))
        return [(tuning.num_warps, tuning.num_stages) for tuning in found]

    assert tunings(4, 4, 128) == tunings(4, 2, 128) == [(1, 4), DEEP_TUNING]
    assert all(a == b for a, b in (tunings(8, 8, 128), tunings(2, 2, 128), tunings(4, 4, 256), tunings(4, bank=True)))


@pytest.mark.parametrize("is_first", [False, True])
def test_the_first_kernel_of_a_chain_waits_before_it_lets_others_start(is_first: bool) -> None:
    """The others need no wait before they read what was written before the first: they wait only at their end."""
    arguments = cases.constexprs(*cases.sides(4, 4, 128, "channel", 128, 128, heads=2), 4)
    options = {**arguments, "STAGES": 1, "OVERLAP": True, "IS_FIRST": is_first}
    ptx = compile_kernel(decode_int_kernel, options, Tuning(1, 1)).asm["ptx"]
    before, _ = ptx.split("griddepcontrol.launch_dependents")
    if is_first:  # behind the loads of the plan
        assert 0 < before.rindex("ld.global") < before.rindex("griddepcontrol.wait")
    else:
        assert "ld.global" not in before and "griddepcontrol.wait" not in before
