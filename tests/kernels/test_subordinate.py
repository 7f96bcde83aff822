"""Subordinate sides: metadata of their own, read with the codes of the same side one layer below."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.block_attention import block_attention, block_attention_reference
from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.dequant import dequant, dequant_reference
from qkv_engine.kernels.formats import BlockLayout, PageShape, Side, SideBytes, check_step, make_format
from qkv_engine.kernels.formats.uniform.layout import Uniform
from qkv_engine.kernels.seal import seal, seal_reference

from .common import relative_error
from .format_pages import Blocks, lay_apart, make_blocks, slot, sow_odd, written
from .interpreted import run_cases
from .subordinate_sides import all_pairs, pair_steps, pairs

SHAPE = PageShape(2, 128, 80)

layouts = pytest.mark.parametrize("lay_out", [BlockLayout.stack, lay_apart])


def sealed(sides: list[Side], lay_out: Callable = BlockLayout.stack, x: Tensor | None = None) -> Blocks:
    blocks = make_blocks(sides, SHAPE, num_blocks=2, lay_out=lay_out, x=x)
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    return blocks


def test_names_and_parameters() -> None:
    for name in ("int2-token-32-subordinate", "int1-channel-64-eta1/6-subordinate"):
        fmt = make_format(name, torch.bfloat16)
        assert isinstance(fmt, Uniform) and fmt.is_subordinate and fmt.name == name
    for name in ("int2-token-32-subordinate-eta0.1", "int2-token-32-subordinated", "dense16-subordinate"):
        with pytest.raises(ConfigError, match="unknown KV format"):
            make_format(name, torch.bfloat16)


def test_codes_are_counted_once() -> None:
    k, v, above_k, above_v = pairs(2, SHAPE)[:4]
    layout = BlockLayout.stack([k, v, above_k, above_v])
    assert above_k.codes_nbytes == above_v.codes_nbytes == 0 and above_v.meta_nbytes == v.meta_nbytes
    assert layout.nbytes == k.nbytes + v.nbytes + above_k.nbytes + above_v.nbytes < 2 * (k.nbytes + v.nbytes)
    below, above = layout.pages
    assert (above.k, above.v) == (k, v) and above != below
    assert above.k_place.codes == below.k_place.codes and above.v_place.codes == below.v_place.codes
    assert above.k_place.meta == layout.nbytes - above_v.nbytes - above_k.nbytes


def test_equal_layers_give_equal_values() -> None:
    """Both layers of a pair with the same elements: dequantized values are the same, exactly."""
    x = torch.randn(2, 1, 2, 128, 80, generator=torch.Generator().manual_seed(0))
    for bits in (8, 4, 3, 2, 1):
        blocks = sealed(pairs(bits, SHAPE), x=x)
        for below, above in zip(blocks.target.pages[::2], blocks.target.pages[1::2], strict=True):
            values = [dequant(blocks.memory, blocks.dst, page, torch.float32) for page in (below, above)]
            for side, lower, upper in zip((below.k, below.v), *values, strict=True):
                assert torch.equal(lower, upper)
                expected = side.family.dequantize(side.family.quantize(blocks.x[:, 0], side), side)
                assert relative_error(upper, expected) <= 1e-6


def test_other_layers_give_the_codes_of_the_layer_below_in_their_own_ranges() -> None:
    blocks = sealed(pairs(2, SHAPE))
    for number, page in enumerate(blocks.target.pages):
        if number % 2:
            out = dequant(blocks.memory, blocks.dst, page, torch.float32)
            for i, side in enumerate((page.k, page.v)):
                lower, upper = (side.family.quantize(blocks.x[:, 2 * n + i], side) for n in (number - 1, number))
                expected = side.family.dequantize(SideBytes(lower.codes, upper.meta), side)
                assert relative_error(out[i], expected) <= 1e-6


@layouts
def test_cpu_seal_equals_the_reference_and_writes_no_other_byte(lay_out: Callable) -> None:
    blocks = sow_odd(make_blocks(all_pairs(SHAPE), SHAPE, num_blocks=2, lay_out=lay_out))
    before, expected = blocks.memory.clone(), blocks.memory.clone()
    where = blocks.src, blocks.dst, blocks.source, blocks.target
    assert torch.equal(seal(blocks.memory, *where), seal_reference(expected, *where))
    assert torch.equal(blocks.memory, expected)
    for address in blocks.dst:
        slot(before, address, blocks.target)[written(blocks.target)] = 0
        slot(blocks.memory, address, blocks.target)[written(blocks.target)] = 0
    assert torch.equal(blocks.memory, before)


@layouts
def test_cpu_demotions_equal_the_reference(lay_out: Callable) -> None:
    steps = pair_steps(SHAPE)
    blocks, target = sealed([old for old, _ in steps], lay_out), lay_out([new for _, new in steps])
    expected, where = blocks.memory.clone(), (blocks.dst, blocks.next, blocks.target, target)
    demote(blocks.memory, *where)
    demote_reference(expected, *where)
    assert torch.equal(blocks.memory, expected)


@pytest.mark.parametrize(("wide", "narrow"), [(8, 4), (4, 2), (8, 1), (2, 1)])
def test_a_demoted_pair_is_a_pair_sealed_at_that_width(wide: int, narrow: int) -> None:
    direct = sealed(pairs(narrow, SHAPE))
    for old in (pairs(wide, SHAPE), [side.dominant or side for side in pairs(wide, SHAPE)]):
        blocks = make_blocks(old, SHAPE, num_blocks=2)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        demote(blocks.memory, blocks.dst, blocks.next, blocks.target, direct.target)
        for a, b in zip(blocks.next, direct.dst, strict=True):
            assert torch.equal(slot(blocks.memory, a, direct.target), slot(direct.memory, b, direct.target))


@layouts
def test_attention_equals_the_reference(lay_out: Callable) -> None:
    blocks = sealed(all_pairs(SHAPE), lay_out)
    q = torch.randn(2, 2, 3, 80, generator=torch.Generator().manual_seed(1))
    first, second = sorted(blocks.dst.tolist())
    for page in blocks.target.pages:
        for where in (blocks.dst, range(first, second + 1, second - first)):
            at = torch.tensor(where) if isinstance(where, range) else where
            expected, expected_lse = block_attention_reference(q, blocks.memory, at, page, 0.1)
            out, lse = block_attention(q, blocks.memory, where, page, 0.1)
            assert relative_error(out, expected) <= 2e-5 and (lse - expected_lse).abs().max() <= 1e-4
        assert all(x.isfinite().all() for x in dequant_reference(blocks.memory, blocks.dst, page))


def test_codes_that_are_gone_do_not_come_back() -> None:
    above = Uniform(8, "token", 64, is_subordinate=True).layout(SHAPE, "v")
    check_step(above, Uniform(4, "token", 64, is_subordinate=True).layout(SHAPE, "v"))
    with pytest.raises(ValueError, match="no codes of its own"):
        check_step(above, Uniform(4, "token", 64).layout(SHAPE, "v"))


def test_triton_equals_the_references() -> None:
    pytest.importorskip("triton")
    from . import subordinate_cases

    assert run_cases(subordinate_cases.__file__) == {"seal": 0, "demote": 0}
