"""The registry of formats by name, and the sizes, errors and refusals of uniform ones."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats import FAMILIES, PageShape, make_format, narrower_formats
from qkv_engine.kernels.formats.uniform.layout import AXES, BITS, GROUPS, Uniform

from .format_pages import format_sides

HEAD_DIMS = (64, 80, 96, 128, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_names_lead_to_formats(dtype: torch.dtype) -> None:
    names = [name for family in FAMILIES for name in family.formats(dtype)]
    assert [make_format(name, dtype).name for name in names] == names and len(set(names)) == len(names)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_heads_follow_one_another(num_kv_heads: int, head_dim: int) -> None:
    shape = PageShape(num_kv_heads, 128, head_dim)
    for bits in BITS:
        for axis in AXES:
            for group in GROUPS:
                side = Uniform(bits, axis, group).layout(shape, "k")
                across = head_dim if axis == "channel" else 128
                assert side.head_codes_nbytes == 128 * head_dim * bits // 8 and side.head_codes_nbytes % 16 == 0
                assert side.head_meta_nbytes == 4 * side.num_groups * across and side.head_meta_nbytes % 16 == 0
                assert side.top_offset == num_kv_heads * side.head_meta_nbytes
                assert side.meta_nbytes == side.top_offset + 2 * num_kv_heads


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_effective_bits(bits: int, axis: str, group: int) -> None:
    """Codes + 32 / group and at most 0.01 bit more at 8 heads of 128."""
    effective = 8 * Uniform(bits, axis, group).layout(PageShape(8, 128, 128), "v").nbytes / (8 * 128 * 128)
    assert 0 < effective - (bits + 32 / group) <= 0.01


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("axis", AXES)
def test_fewer_bits_mean_fewer_bytes_and_more_error(axis: str, group: int, head_dim: int) -> None:
    x = torch.randn(1, 2, 128, head_dim, generator=torch.Generator().manual_seed(head_dim))
    errors, sizes = [], []
    for bits in BITS:
        side = Uniform(bits, axis, group).layout(PageShape(2, 128, head_dim), "k")
        out = side.family.dequantize(side.family.quantize(x, side), side)
        errors.append(float((out - x).norm() / x.norm()))
        sizes.append(side.nbytes)
    assert errors == sorted(errors) and errors[0] < 0.01
    assert sizes == sorted(sizes, reverse=True) and sizes[0] < 2 * 128 * head_dim * 4 / 2


@pytest.mark.parametrize(
    ("bits", "axis", "group", "field"), [(5, "token", 64, "bits"), (4, "row", 64, "axis"), (4, "token", 48, "group")]
)
def test_other_parameters_are_refused(bits: int, axis: str, group: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}="):
        Uniform(bits, axis, group)


@pytest.mark.parametrize("bits", BITS)
def test_an_odd_head_dim_takes_even_bits_alone(bits: int) -> None:
    fmt, shape = Uniform(bits, "channel", 64), PageShape(1, 128, 7)
    if bits in (8, 4, 2):
        assert fmt.layout(shape, "k").codes_nbytes == 16 * bits * 7
    else:
        with pytest.raises(ConfigError, match=f"int{bits}-channel-64.*even head dim.*8, 4 or 2"):
            fmt.layout(shape, "k")


def test_steps_down_are_found() -> None:
    shape = PageShape(2, 128, 128)
    choices = narrower_formats(Uniform(4, "token", 64).layout(shape, "v"))
    assert [fmt.name for fmt in choices] == ["int2-token-64", "int1-token-64"]
    assert narrower_formats(Uniform(3, "token", 64).layout(shape, "v")) == []
    dense = make_format("dense16", torch.bfloat16).layout(shape, "k")
    others = [fmt for family in FAMILIES[1:] for fmt in family.formats(torch.bfloat16).values()]
    others = [fmt.name for fmt in others if any(side.name == "k" for side in format_sides(fmt, shape))]
    assert [fmt.name for fmt in narrower_formats(dense)] == others


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4-channel-128"):
        make_format("int5-channel-128", torch.bfloat16)
