"""Dequantization and attention on codes: the fast CPU paths against the references."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from qkv_engine.kernels.block_attention import block_attention, block_attention_reference
from qkv_engine.kernels.block_attention import cpu as block_attention_cpu
from qkv_engine.kernels.demote import demote
from qkv_engine.kernels.dequant import dequant, dequant_reference
from qkv_engine.kernels.formats import BlockLayout, PageShape
from qkv_engine.kernels.formats.uniform import cpu as uniform_cpu
from qkv_engine.kernels.formats.uniform.layout import AXES, GROUPS, Uniform
from qkv_engine.kernels.seal import seal

from .common import relative_error
from .format_pages import HEAD_DIMS, all_sides, lay_apart, make_blocks

BITS = (8, 4, 3, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cpu_equals_reference(head_dim: int, dtype: torch.dtype) -> None:
    shape = PageShape(2, 128, head_dim)
    for bits in BITS:
        blocks = make_blocks(all_sides(bits, shape), shape, num_blocks=2)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        for page in blocks.target.pages:
            found = dequant(blocks.memory, blocks.dst, page, dtype)
            for out, expected in zip(found, dequant_reference(blocks.memory, blocks.dst, page), strict=True):
                assert out.dtype == dtype and out.shape == (2, 2, 128, head_dim) and out.is_contiguous()
                assert relative_error(out, expected) <= {torch.float32: 1e-6}.get(dtype, 4e-3)


def test_dense_sides_come_back_as_they_are() -> None:
    shape = PageShape(2, 128, 64)
    blocks = make_blocks(all_sides(8, shape)[:2], shape, num_blocks=3)
    k, v = dequant(blocks.memory, blocks.src, blocks.source.pages[0], torch.bfloat16)
    assert torch.equal(k, blocks.x[:, 0]) and torch.equal(v, blocks.x[:, 1])


@pytest.mark.parametrize("v_axis", AXES)
@pytest.mark.parametrize("k_axis", AXES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_block_attention_equals_reference(head_dim: int, group: int, k_axis: str, v_axis: str) -> None:
    shape = PageShape(2, 128, head_dim)
    for bits in BITS:
        layout = (Uniform(bits, k_axis, group).layout(shape, "k"), Uniform(bits, v_axis, group).layout(shape, "v"))
        blocks = make_blocks(layout, shape, num_blocks=3)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        q = torch.randn(3, 2, 3, head_dim, generator=torch.Generator().manual_seed(1))
        where = blocks.memory, blocks.dst, blocks.target.pages[0], head_dim**-0.5
        out, lse = block_attention(q, *where)
        expected, expected_lse = block_attention_reference(q, *where)
        assert relative_error(out, expected) <= 2e-5
        assert (lse - expected_lse).abs().max() <= 1e-4


def test_block_attention_hides_first_tokens_and_caps_scores() -> None:
    shape = PageShape(2, 128, 64)
    blocks = make_blocks(all_sides(4, shape), shape, num_blocks=5)
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    q, hidden = torch.randn(5, 2, 3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 64, 100, 127])
    for page in blocks.target.pages:
        where = blocks.memory, blocks.dst, page, 0.2
        out, lse = block_attention(q, *where, hidden=hidden, softcap=1.5)
        expected, expected_lse = block_attention_reference(q, *where, hidden=hidden, softcap=1.5)
        assert relative_error(out, expected) <= 2e-5
        assert (lse - expected_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("module", [block_attention_cpu, uniform_cpu])
def test_block_attention_in_pieces_equals_the_reference(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    shape = PageShape(2, 128, 64)
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 2 * 2 * 128 * 64 // torch.get_num_threads())
    for bits in BITS:
        blocks = make_blocks(all_sides(bits, shape), shape, num_blocks=5)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        q = torch.randn(5, 2, 3, 64, generator=torch.Generator().manual_seed(bits))
        for page in blocks.target.pages:
            expected, expected_lse = block_attention_reference(q, blocks.memory, blocks.dst, page, 0.125)
            out, lse = block_attention(q, blocks.memory, blocks.dst, page, 0.125)
            assert relative_error(out, expected) <= 2e-5
            assert (lse - expected_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("lay_out", [BlockLayout.stack, lay_apart])
@pytest.mark.parametrize("k_axis", AXES)
def test_blocks_in_even_steps_are_read_in_place(k_axis: str, lay_out: Callable) -> None:
    shape = PageShape(2, 128, 128)
    for bits in BITS:
        layout = (Uniform(bits, k_axis, 128).layout(shape, "k"), Uniform(bits, "token", 128).layout(shape, "v"))
        blocks = make_blocks(layout, shape, num_blocks=2, lay_out=lay_out)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        first, second = sorted(blocks.dst.tolist())
        where, page = range(first, second + 1, second - first), blocks.target.pages[0]
        for queries in (torch.randn(2, 2, 3, 128), torch.randn(1, 2, 3, 128)):
            expected = block_attention_reference(queries, blocks.memory, torch.tensor(where), page, 0.1)
            out, lse = block_attention(queries, blocks.memory, where, page, 0.1)
            assert relative_error(out, expected[0]) <= 2e-5
            assert (lse - expected[1]).abs().max() <= 1e-4


def test_logits_of_a_demoted_page_are_those_of_a_page_sealed_at_that_width() -> None:
    shape = PageShape(2, 128, 128)
    wide, narrow = (
        [Uniform(bits, "channel", 128).layout(shape, "k"), Uniform(bits, "token", 128).layout(shape, "v")]
        for bits in (8, 2)
    )
    demoted, direct = make_blocks(wide, shape), make_blocks(narrow, shape)
    for blocks in (demoted, direct):
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    demote(demoted.memory, demoted.dst, demoted.next, demoted.target, direct.target)
    q = torch.randn(1, 2, 4, 128)
    page = direct.target.pages[0]
    out = block_attention(q, demoted.memory, demoted.next, page, 0.1)
    expected = block_attention(q, direct.memory, direct.dst, page, 0.1)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])
