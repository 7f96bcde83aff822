"""Sealing: golden values, bounds, nesting, extreme values, twins, independence of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.dequant import dequant_reference
from qkv_engine.kernels.formats import BlockLayout, PageShape, Place
from qkv_engine.kernels.formats.family import LIMIT
from qkv_engine.kernels.formats.page import Step
from qkv_engine.kernels.formats.rows import even_runs
from qkv_engine.kernels.formats.uniform import Uniform, UniformSide
from qkv_engine.kernels.formats.uniform.reference import (
    encode,
    read_codes,
    read_meta,
    round_down,
    round_up,
    spread,
    tops,
)
from qkv_engine.kernels.seal import seal, seal_reference

from .format_pages import HEAD_DIMS, all_sides, lay_apart, make_blocks, side_rows, slot, written

BITS = (8, 4, 3, 2, 1)


def quantize_groups(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, G], min and range [N] of rows of ``x`` [N, G], each a group."""
    rows, width = x.shape
    group = 1 << max(5, (width - 1).bit_length())
    padded = torch.cat([x, x[:, -1:].expand(rows, group - width)], 1)
    side = Uniform(bits, "token", group).layout(PageShape(1, rows, group), "k")
    codes, meta = encode(padded[None, None], side)
    return codes[0, 0, :, :width], meta[0].flatten(), meta[1].flatten()


def test_golden_four_levels() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    codes, low, span = quantize_groups(x, 2)
    assert codes.tolist() == [[0, 1, 2, 3]] and low.item() == 0 and span.item() == 3
    assert quantize_groups(x, 4)[0].tolist() == [[0, 5, 10, 15]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -7.25, 2**-24, 32752.0, -32752.0])
def test_a_constant_group_is_exact(bits: int, value: float) -> None:
    codes, low, span = quantize_groups(torch.full((1, 32), value), bits)
    assert codes.max() == 0 and span.item() == 0 and low.item() == value
    assert not low.signbit().item() or value < 0


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_halves_round_to_even(bits: int) -> None:
    """1 bit has one tie, at 127.5 of 255, which the 8-bit code rounds up."""
    top = 2**bits - 1
    levels = torch.tensor([[0.0, float(top), *(k + 0.5 for k in range(min(top, 20)))]])
    codes = quantize_groups(levels, bits)[0][0, 2:]
    assert codes.tolist() == [k + k % 2 for k in range(min(top, 20))]


@pytest.mark.parametrize("bits", BITS)
def test_affine_maps_keep_the_codes(bits: int) -> None:
    x = torch.randint(-100, 100, (40, 32)).float()
    x[:, :2] = torch.tensor([-100.0, 100.0])
    assert torch.equal(quantize_groups(x, bits)[0], quantize_groups(4 * x + 64, bits)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_are_those_of_direct_quantization_in_float64(dtype: torch.dtype) -> None:
    """Exact but for values on a threshold: at most one code in a thousand differs, by one."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    for bits in BITS:
        codes, low, span = (t.double() for t in quantize_groups(x, bits))
        exact = ((x.double() - low[:, None]) * (2**bits - 1) / span[:, None]).round()
        difference = (codes - exact).abs()
        assert difference.max() <= 1 and (difference > 0).double().mean() <= 1e-3


def test_kivi_codes() -> None:
    """KIVI's fp16 arithmetic gives the same codes wherever range and step are exact in fp16."""
    x = torch.randint(0, 97, (200, 32)).half()
    x[:, 0], x[:, 1] = 0, 96
    for bits, step in ((2, 32.0), (4, 6.4)):
        kivi = ((x - 0) / torch.tensor(step).half()).clamp(0, 2**bits - 1).round()
        ours = quantize_groups(x.float(), bits)[0]
        assert (ours != kivi).double().mean() <= (0 if bits == 2 else 0.02)


# Every dtype and both layouts with every head dim; all pairs of them are the long form.
LAID_OUT = [
    *((torch.bfloat16, BlockLayout.stack), (torch.float16, lay_apart), (torch.float32, BlockLayout.stack)),
    pytest.param(torch.bfloat16, lay_apart, marks=pytest.mark.slow),
    pytest.param(torch.float16, BlockLayout.stack, marks=pytest.mark.slow),
    pytest.param(torch.float32, lay_apart, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "lay_out"), LAID_OUT)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cpu_equals_reference_and_leaves_other_bytes(head_dim: int, dtype: torch.dtype, lay_out: Callable) -> None:
    shape = PageShape(3, 128, head_dim)
    for bits in BITS:
        blocks = make_blocks(all_sides(bits, shape), shape, num_blocks=2, dtype=dtype, lay_out=lay_out)
        expected = blocks.memory.clone()
        seal_reference(expected, blocks.src, blocks.dst, blocks.source, blocks.target)
        untouched = blocks.memory == 255
        finite = seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        assert finite.all() and torch.equal(blocks.memory, expected)
        for address in blocks.dst:
            slot(untouched, address, blocks.target)[written(blocks.target)] = False
        assert (blocks.memory[untouched] == 255).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_error_is_at_most_half_a_step(head_dim: int) -> None:
    shape = PageShape(2, 128, head_dim)
    for bits in BITS:
        blocks = make_blocks(all_sides(bits, shape), shape, dtype=torch.float32)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        for i, side in enumerate(blocks.target.sides):
            assert isinstance(side, UniformSide)
            rows = side_rows(blocks.memory, blocks.dst, blocks.target, i)
            low, span = (spread(m, side) for m in read_meta(rows, side).double())
            x = blocks.x[:, i].double()
            assert (low <= x).all() and (x <= low + span).all()
            step = span / side.max_code
            codes = read_codes(rows, side).double()
            assert ((low + codes * step - x).abs() <= step * 0.5001).all()
            assert torch.equal(tops(rows, side).double(), span.expand(x.shape).amax((2, 3)))


def test_blocks_do_not_depend_on_their_batch() -> None:
    shape = PageShape(2, 128, 80)
    blocks = make_blocks(all_sides(4, shape), shape, num_blocks=4)
    together = blocks.memory.clone()
    seal(together, blocks.src, blocks.dst, blocks.source, blocks.target)
    for i in (2, 0, 3, 1):
        one = slice(i, i + 1)
        seal(blocks.memory, blocks.src[one], blocks.dst[one], blocks.source, blocks.target)
    assert torch.equal(blocks.memory, together)


def test_a_non_finite_value_is_reported_and_stays_in_its_block() -> None:
    shape = PageShape(2, 128, 64)
    blocks = make_blocks(all_sides(2, shape), shape, num_blocks=4)
    expected = blocks.memory.clone()
    seal(expected, blocks.src, blocks.dst, blocks.source, blocks.target)
    for block, value in ((1, float("nan")), (3, float("-inf"))):
        page = slot(blocks.memory, blocks.src[block], blocks.source).view(torch.bfloat16)
        page[700:800] = value
    finite = seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    assert finite.tolist() == [True, False, True, False]
    for block in range(4):
        here, there = (slot(m, blocks.dst[block], blocks.target) for m in (blocks.memory, expected))
        assert torch.equal(here, there) == finite[block]
        for page in blocks.target.pages:
            k, v = dequant_reference(blocks.memory, blocks.dst[block : block + 1], page)
            assert k.isfinite().all() and v.isfinite().all()


@pytest.mark.parametrize("values", [(float("nan"),), (float("inf"), -1e30), (32752.5,), (-3e38, 3e38), (-0.0, 1e-42)])
def test_values_off_the_fast_path_are_stored_as_by_the_reference(values: tuple[float, ...]) -> None:
    shape = PageShape(2, 128, 80)
    for bits in BITS:
        blocks = make_blocks(all_sides(bits, shape), shape, num_blocks=2, dtype=torch.float32)
        page = slot(blocks.memory, blocks.src[1], blocks.source).view(torch.float32)
        page[torch.arange(77, page.numel(), 997)] = torch.tensor(values).repeat(page.numel())[: len(page[77::997])]
        expected = blocks.memory.clone()
        where = blocks.src, blocks.dst, blocks.source, blocks.target
        finite = seal(blocks.memory, *where)
        assert torch.equal(finite, seal_reference(expected, *where))
        assert finite.tolist() == [True, all(abs(value) < float("inf") for value in values)]
        assert torch.equal(blocks.memory, expected)


def test_layers_of_many_formats_in_any_order() -> None:
    """Sides of one kind lie at uneven distances, so that they are sealed and demoted in several runs."""
    shape = PageShape(2, 128, 64)
    eight, four, two = (Uniform(bits, "channel", 64) for bits in (8, 4, 2))
    formats = [eight, eight, four, eight, eight, four, four, eight]
    blocks = make_blocks([fmt.layout(shape, "kv"[i % 2]) for i, fmt in enumerate(formats)], shape, num_blocks=2)
    expected = blocks.memory.clone()
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    seal_reference(expected, blocks.src, blocks.dst, blocks.source, blocks.target)
    assert torch.equal(blocks.memory, expected)
    lower = {eight: four, four: two}
    target = BlockLayout.stack(lower[fmt].layout(shape, "kv"[i % 2]) for i, fmt in enumerate(formats))
    demote(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
    demote_reference(expected, blocks.dst, blocks.next, blocks.target, target)
    assert torch.equal(blocks.memory, expected)


def test_runs_are_even_and_lose_nobody() -> None:
    """All four offsets have to grow evenly, and none may shrink."""
    offsets = [(0, 1, 0, 0), (10, 3, 5, 0), (20, 5, 10, 0), (35, 7, 15, 0), (50, 9, 20, 0), (51, 10, 90, 0)]
    offsets += [(52, 11, 160, 0), (53, 12, 230, 8), (54, 10, 300, 16)]
    members = [Step(Place(*row[:2]), Place(*row[2:])) for row in offsets]
    assert even_runs(members) == [members[:3], members[3:5], members[5:7], members[7:8], members[8:]]
    assert even_runs([]) == []


def test_dense_sides_are_copied_and_their_dtype_kept() -> None:
    shape = PageShape(2, 128, 64)
    int4 = Uniform(4, "token", 64).layout(shape, "v")
    probe = make_blocks([int4], shape)
    blocks = make_blocks([probe.source.sides[0], int4], shape)
    assert seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target).all()
    copied = slot(blocks.memory, blocks.dst[0], BlockLayout.stack(blocks.target.sides[:1]))
    assert torch.equal(copied.view(torch.bfloat16), blocks.x[0, 0].flatten())
    with pytest.raises(ValueError, match="dtype"):
        wide = make_blocks([int4, int4], shape, dtype=torch.float32)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, wide.source)


@pytest.mark.parametrize("bits", [8, 2])
def test_addresses_beyond_two_gibibytes(bits: int) -> None:
    shape = PageShape(1, 128, 64)
    small = make_blocks(all_sides(bits, shape)[:2], shape)
    seal(small.memory, small.src, small.dst, small.source, small.target)
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)  # pages that are never touched take no memory
    src, dst = torch.tensor([2**31 + 64]), torch.tensor([2**31 + 2**19])
    slot(memory, src, small.source)[:] = slot(small.memory, small.src, small.source)
    slot(memory, dst, small.target)[:] = 255
    seal(memory, src, dst, small.source, small.target)
    assert torch.equal(slot(memory, dst, small.target), slot(small.memory, small.dst, small.target))


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-40, -1e-40, 6e-8, 65504.0, 3e38, -3e38, LIMIT, -LIMIT, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=32), st.sampled_from(BITS))
def test_any_values_give_finite_codes_within_half_a_step(values: list[float], bits: int) -> None:
    x = torch.tensor([values])
    codes, low, span = quantize_groups(x, bits)
    assert low.isfinite().all() and span.isfinite().all() and (span >= 0).all()
    assert int(codes.max()) < 2**bits
    held = torch.where(x.isfinite(), x, 0).clamp(-LIMIT, LIMIT).double()
    step = span.double() / (2**bits - 1)
    # A subnormal minimum is at most one fp16 quantum below its value, and the range covers it.
    assert ((low.double() + codes * step - held).abs() <= 0.5001 * step).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(-32752, 65504, width=32))
def test_directed_rounding(value: float) -> None:
    x = torch.tensor([value])
    low, high = round_down(x), round_up(x.abs())
    assert low.float() <= x and high.float() >= x.abs()
    neighbours = torch.nextafter(low, torch.tensor([torch.inf]).half())
    assert low.float() == x or neighbours.float() > x
    assert high.float() == x.abs() or torch.nextafter(high, torch.zeros(1).half()).float() < x.abs()
