"""Packed codes: the bits where the layout says they are, and back."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.kernels.formats.uniform.codes import code_planes, narrow, pack, unpack
from qkv_engine.kernels.formats.uniform.reference import shrink

BITS = (8, 4, 3, 2, 1)


def make_codes(bits: int, head_dim: int, num_tokens: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 2**bits, (2, 3, num_tokens, head_dim), generator=generator).to(torch.uint8)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [2, 6, 64, 80])
def test_unpack_inverts_pack(bits: int, side: str, head_dim: int) -> None:
    codes = make_codes(bits, head_dim)
    packed = pack(codes, bits, side)
    assert packed.shape == (2, 3, 16 * bits * head_dim)
    assert torch.equal(unpack(packed, bits, side, 128), codes)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", BITS)
def test_every_bit_lies_where_the_layout_says(bits: int, side: str) -> None:
    codes = make_codes(bits, 6)[0, 0]
    packed = pack(codes, bits, side)
    first = 0
    found = torch.zeros_like(codes)
    for width, low in ((2, 0), (1, 2)) if bits == 3 else ((bits, 0),):
        lanes, columns = (32, 3) if width == 1 else (128 * width // 8, 6)
        for t in range(128):
            for d in range(6):
                lane, column = t % lanes, d % columns
                byte = int(packed[first + (lane * columns + column if side == "k" else column * lanes + lane)])
                shift = t // lanes * width + 4 * (d // columns)
                found[t, d] |= (byte >> shift & (1 << width) - 1) << low
        first += lanes * columns
    assert first == len(packed) and torch.equal(found, codes)


def test_three_bits_are_a_set_of_two_and_a_set_of_one() -> None:
    codes = make_codes(3, 64)
    packed = pack(codes, 3, "k")
    assert torch.equal(packed[..., : 32 * 64], pack(codes & 3, 2, "k"))
    assert torch.equal(packed[..., 32 * 64 :], pack(codes >> 2, 1, "k"))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", BITS)
def test_masked_planes_are_shifted_codes(bits: int, side: str) -> None:
    codes = make_codes(bits, 80)
    found = code_planes(pack(codes, bits, side), bits, side, 128)
    num_planes = 1 if bits % 2 else 8 // bits
    assert found.shape[:3] == (2, 3, num_planes)
    found = torch.stack([plane >> bits * p for p, plane in enumerate(found.unbind(2))], 2)
    out = found if side == "k" else found.mT
    assert torch.equal(out.flatten(2, 3), codes)


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_the_short_shift_equals_the_reference_for_every_code(bits: int) -> None:
    codes = torch.arange(1 << 2 * bits)
    short = ((1 << bits) - 1) * (codes + (1 << bits - 1) + 1) >> 2 * bits
    assert torch.equal(short, shrink(codes, 2 * bits, bits))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(("wide", "few"), [(8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1)])
def test_narrowing_words_is_shrinking_codes(wide: int, few: int, side: str) -> None:
    """The output is a view with other bytes between its rows."""
    codes = torch.randint(0, 2**wide, (2, 3, 128, 640), generator=torch.Generator().manual_seed(wide))
    expected = pack(shrink(codes, wide, few).byte(), few, side)
    space = torch.full((2, 3, expected.shape[-1] + 32), 77, dtype=torch.uint8)
    narrow(pack(codes.byte(), wide, side), wide, few, side, 128, space[..., 16:-16])
    assert torch.equal(space[..., 16:-16], expected)
    assert (space[..., :16] == 77).all() and (space[..., -16:] == 77).all()
