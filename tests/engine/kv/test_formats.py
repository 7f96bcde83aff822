"""Conformance of every registered page format: byte formula, error by width, names, refusals."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.dequant import dequant_reference
from qkv_engine.kernels.layout import BlockLayout, UniformSide
from qkv_engine.kernels.seal import seal
from qkv_engine.kv.formats import PageShape, make_format
from qkv_engine.kv.formats.dense import Dense
from qkv_engine.kv.formats.uniform import AXES, BITS, GROUPS, Uniform, uniform_formats

NAMES = ["dense16", "dense32", *uniform_formats()]
HEAD_DIMS = (64, 80, 96, 128, 256)


@pytest.mark.parametrize("name", NAMES)
def test_names_lead_to_formats(name: str) -> None:
    assert make_format(name, torch.bfloat16).name == name


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_layout_agrees_with_the_byte_formula(name: str, num_kv_heads: int, head_dim: int) -> None:
    fmt, shape = make_format(name, torch.bfloat16), PageShape(num_kv_heads, 128, head_dim)
    elements = num_kv_heads * 128 * head_dim
    assert fmt.codes_nbytes(shape) * 8 == elements * fmt.bits
    for side in ("k", "v"):
        layout = fmt.layout(shape, side)
        assert layout.nbytes == fmt.codes_nbytes(shape) + fmt.meta_nbytes(shape)
        if not isinstance(layout, UniformSide):
            continue
        assert layout.nbytes % 128 == layout.meta_offset % 16 == layout.top_offset % 16 == 0
        assert layout.head_codes_nbytes % 16 == layout.head_meta_nbytes % 16 == 0
        assert layout.meta_offset == num_kv_heads * layout.head_codes_nbytes == fmt.codes_nbytes(shape)
        assert layout.top_offset == layout.meta_offset + num_kv_heads * layout.head_meta_nbytes
        across = head_dim if layout.axis == "channel" else 128
        assert layout.head_meta_nbytes == 4 * layout.num_groups * across
        assert 0 <= layout.nbytes - (layout.top_offset + 2 * num_kv_heads) < 128
        assert layout.meta_lanes * layout.meta_planes == 128


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_effective_bits(bits: int, axis: str, group: int) -> None:
    """Codes + 32 / group and at most 0.01 bit more at 8 heads of 128."""
    fmt, shape = Uniform(bits, axis, group), PageShape(8, 128, 128)
    effective = 8 * (fmt.codes_nbytes(shape) + fmt.meta_nbytes(shape)) / (8 * 128 * 128)
    assert 0 < effective - (bits + 32 / group) <= 0.01


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("axis", AXES)
def test_fewer_bits_mean_fewer_bytes_and_more_error(axis: str, group: int, head_dim: int) -> None:
    shape = PageShape(2, 128, head_dim)
    dense = BlockLayout((Dense("dense32", torch.float32).layout(shape, "k"),))
    x = torch.randn(1, 2, 128, head_dim, generator=torch.Generator().manual_seed(head_dim))
    errors, sizes = [], []
    for bits in BITS:
        target = BlockLayout((Uniform(bits, axis, group).layout(shape, "k"),))
        memory = torch.full((dense.nbytes + target.nbytes,), 255, dtype=torch.uint8)
        memory[: dense.nbytes] = x.flatten().view(torch.uint8)
        src, dst = torch.tensor([0]), torch.tensor([dense.nbytes])
        assert seal(memory, src, dst, dense, target).all()
        out = dequant_reference(memory, dst, target.sides[0], torch.float32)
        errors.append(float((out - x).norm() / x.norm()))
        sizes.append(target.nbytes)
    assert errors == sorted(errors) and errors[0] < 0.01
    assert sizes == sorted(sizes, reverse=True) and sizes[0] < dense.nbytes / 2


@pytest.mark.parametrize(
    ("bits", "axis", "group", "field"), [(5, "token", 64, "bits"), (4, "row", 64, "axis"), (4, "token", 48, "group")]
)
def test_other_parameters_are_refused(bits: int, axis: str, group: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}="):
        Uniform(bits, axis, group)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4-channel-128"):
        make_format("int5-channel-128", torch.bfloat16)
