"""Formats of states: errors of at most half a step, columns of zeros, and 16 bits on the way, which change nothing."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.kernels.delta_net.formats import FLOAT32, INT8, INT16, StateFormat, Stored, decode, encode, narrow


def state() -> torch.Tensor:
    """Columns of very different sizes: zeros, numbers near the least and the greatest of float32, one lone value."""
    torch.manual_seed(0)
    found = torch.randn(3, 20, 13) * torch.logspace(-37, 37, 13)
    found[0, :, 3] = 0
    found[1, :, 4] = 0
    found[1, 7, 4] = -5.0
    return found


@pytest.mark.parametrize(("fmt", "levels"), [(INT16, 127 << 8), (INT8, 127)])
def test_errors_are_at_most_half_a_step(fmt: StateFormat, levels: int) -> None:
    wide = state()
    stored = encode(wide, fmt)
    assert stored.elements.dtype is fmt.dtype and stored.elements.int().abs().max() == levels
    step = wide.abs().amax(1, keepdim=True) / levels
    error = (decode(stored) - wide).abs()
    known = step > 1e-30
    assert (error <= step * (0.5 + 2**-8 + 1e-3 * (fmt is INT16)))[known.expand_as(error)].all()
    assert not decode(stored)[0, :, 3].any() and decode(stored).isfinite().all()
    torch.testing.assert_close(decode(stored)[1, :, 4], wide[1, :, 4])


def test_16_bits_on_the_way_to_8_change_nothing() -> None:
    wide = state()
    direct, through = encode(wide, INT8), narrow(encode(wide, INT16), INT16, INT8)
    for mine, theirs in zip(direct, through, strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)
    again = narrow(Stored(wide, None), FLOAT32, INT8)
    assert torch.equal(again.elements, direct.elements)


def test_decay_of_a_whole_state_changes_no_code() -> None:
    kept = encode(state(), INT8)
    for _ in range(100):
        kept = encode(decode(kept) * 0.97, INT8)
    usual = slice(5, 9)
    assert torch.equal(kept.elements[..., usual], encode(state(), INT8).elements[..., usual])
