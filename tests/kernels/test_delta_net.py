"""Gated delta-net: its forms in torch agree with the token by token definition, and with each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv_engine.kernels.delta_net import DeltaWeights, StateSpec, gated_rms_norm, reference
from qkv_engine.kernels.delta_net.cpu import CHUNK, delta_net_chunk, delta_net_step

SPECS = [
    StateSpec(num_k_heads=1, num_v_heads=1, k_dim=1, v_dim=1, conv_width=2),
    StateSpec(num_k_heads=2, num_v_heads=6, k_dim=20, v_dim=13, conv_width=4),
    StateSpec(num_k_heads=3, num_v_heads=3, k_dim=32, v_dim=48, conv_width=3),
]


def make(spec: StateSpec, num_tokens: int) -> tuple[DeltaWeights, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Weights, then qkv, b and a of tokens, then a state."""
    torch.manual_seed(num_tokens)
    heads = spec.num_v_heads
    conv = torch.randn(spec.num_channels, spec.conv_width)
    weights = DeltaWeights(spec, conv, torch.rand(heads) * 4, torch.randn(heads), torch.ones(spec.v_dim), 1e-6)
    rows = torch.randn(num_tokens, spec.num_channels), torch.randn(num_tokens, heads), torch.randn(num_tokens, heads)
    return weights, rows, (torch.randn(spec.recurrent_shape), torch.randn(spec.conv_shape))


def plain(
    weights: DeltaWeights, rows: tuple[Tensor, Tensor, Tensor], states: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    mixed, conv = reference.short_conv(rows[0], states[1], weights.conv)
    gates = reference.gates(*rows[1:], weights.decay, weights.dt_bias)
    out, recurrent = reference.delta_rule(*weights.spec.split(mixed), *gates, states[0])
    return out, recurrent, conv


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_all_forms_agree(spec: StateSpec, num_tokens: int) -> None:
    weights, rows, states = make(spec, num_tokens)
    expected = plain(weights, rows, states)
    assert_close(delta_net_chunk(*rows, weights, *states), expected)
    single, out = tuple(state[None] for state in states), []
    for t in range(num_tokens):
        token, *single = delta_net_step(*(x[t : t + 1] for x in rows), weights, *single)
        out.append(token[0])
    assert_close((torch.stack(out), *(state[0] for state in single)), expected)


def test_a_sequence_may_be_cut_anywhere() -> None:
    spec = SPECS[1]
    weights, rows, states = make(spec, 200)
    expected, out, start = delta_net_chunk(*rows, weights, *states), [], 0
    for size in (1, 2, 70, 1, 126):
        part, *states = delta_net_chunk(*(x[start : start + size] for x in rows), weights, *states)
        out.append(part)
        start += size
    assert_close((torch.cat(out), *states), expected)


def test_requests_of_a_batch_do_not_mix() -> None:
    spec = SPECS[1]
    weights, rows, _ = make(spec, 5)
    states = torch.randn(5, *spec.recurrent_shape), torch.randn(5, *spec.conv_shape)
    together = delta_net_step(*rows, weights, *states)
    for i in range(5):
        one = slice(i, i + 1)
        alone = delta_net_step(*(x[one] for x in rows), weights, *(state[one] for state in states))
        assert_close(alone, tuple(x[one] for x in together))


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_equal_keys_and_states_that_last_stay_exact(beta: float) -> None:
    """The worst triangular system: all keys are equal, nothing decays; each value replaces the one before."""
    from qkv_engine.kernels.delta_net.cpu import delta_rule

    k, v = torch.ones(3 * CHUNK, 1, 8), torch.randn(3 * CHUNK, 1, 5)
    gates = torch.full((len(v), 1), beta), torch.zeros(len(v), 1)
    found, _ = delta_rule(k, k, v, *gates, torch.zeros(1, 8, 5))
    torch.testing.assert_close(found, beta * v * 8**-0.5, rtol=1e-4, atol=1e-4)


def test_strong_decay_leaves_no_trace_and_no_nan() -> None:
    spec = SPECS[1]
    weights, rows, states = make(spec, 130)
    weights = weights._replace(decay=torch.full((6,), 300.0))
    assert_close(delta_net_chunk(*rows, weights, *states), plain(weights, rows, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    x, z = torch.randn(2, 5, 3, 20).to(dtype)
    weight = torch.randn(20).to(dtype)
    normed = torch.nn.functional.rms_norm(x.float(), (20,), None, 1e-6).to(dtype)
    expected = weight * normed * torch.nn.functional.silu(z.float())
    torch.testing.assert_close(gated_rms_norm(x, z, weight, 1e-6), expected.to(dtype), rtol=2**-7, atol=1e-6)


def test_gradients_pass_through_the_chunked_form() -> None:
    spec = SPECS[1]
    weights, rows, states = make(spec, 70)
    for x in rows:
        x.requires_grad_()
    found = torch.autograd.grad(delta_net_chunk(*rows, weights, *states)[0].square().sum(), rows)
    expected = torch.autograd.grad(plain(weights, rows, states)[0].square().sum(), rows)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_slots_are_aligned_and_split_over_ranks() -> None:
    spec = SPECS[1]
    assert spec.conv_offset % 128 == 0 == spec.nbytes(torch.bfloat16) % 128
    assert spec.conv_offset >= 4 * 6 * 20 * 13 and spec.num_channels == 2 * 2 * 20 + 6 * 13
    half = spec.share(2)
    assert half.recurrent_shape == (3, 20, 13) and 2 * half.num_channels == spec.num_channels
