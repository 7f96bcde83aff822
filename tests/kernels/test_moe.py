"""Mixture of experts on the CPU: the router's choice, and the loop over experts against the reference and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qkv_engine.kernels.moe import Experts, Routing, SoftmaxOver, SwiGLU, experts_mlp, reference, route

from .common import relative_error

GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, shift=1.0)


def test_route_is_torchs_softmax_and_topk() -> None:
    logits = torch.randn(17, 60)
    weights, experts = logits.softmax(-1).topk(4)
    found = route(logits, 4, SoftmaxOver.ALL)
    assert torch.equal(found.experts, experts.int()) and torch.allclose(found.weights, weights)
    chosen = route(logits, 4, SoftmaxOver.CHOSEN)
    assert torch.equal(chosen.experts, experts.int())
    assert torch.allclose(chosen.weights, weights / weights.sum(-1, keepdim=True))


def test_of_equal_logits_the_lower_expert_is_first() -> None:
    logits = torch.tensor(
        [[1.0, 2.0, -0.0, 2.0, 0.0, 2.0], [float("-inf")] * 6, [0.0, float("nan"), 1.0, 1.0, 1.0, 1.0]]
    )
    found = route(logits, 5, SoftmaxOver.CHOSEN)
    assert found.experts.tolist() == [[1, 3, 5, 0, 2], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("num_rows", (0, 1, 3, 17, 33))
@pytest.mark.parametrize(("num", "top_k", "bias"), ((5, 1, False), (8, 3, True)))
@pytest.mark.parametrize("activation", (SwiGLU(), GPT_OSS))
def test_experts_are_the_references(
    dtype: torch.dtype, num_rows: int, num: int, top_k: int, bias: bool, activation: SwiGLU
) -> None:
    experts = Experts(
        torch.randn(num, 74, 40).mul_(0.3).to(dtype),
        torch.randn(num, 40, 37).mul_(0.16).to(dtype),
        torch.randn(num, 74).to(dtype) if bias else None,
        torch.randn(num, 40).to(dtype) if bias else None,
        activation,
    )
    x, routing = torch.randn(num_rows, 40).to(dtype), route(torch.randn(num_rows, num), top_k, SoftmaxOver.ALL)
    found, expected = experts_mlp(x, routing, experts), reference.experts_mlp(x, routing, experts)
    assert found.dtype == dtype and found.shape == expected.shape
    assert num_rows == 0 or relative_error(found, expected) < {4: 1e-6, 2: 2 * torch.finfo(dtype).eps}[dtype.itemsize]


def test_one_token_by_hand() -> None:
    gate_up, down = torch.randn(4, 6, 5), torch.randn(4, 5, 3)
    x, routing = torch.randn(1, 5), Routing(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([[0.75, 0.5]]))
    expected = torch.zeros(5)
    for expert, weight in ((2, 0.75), (0, 0.5)):
        gate, up = gate_up[expert, :3] @ x[0], gate_up[expert, 3:] @ x[0]
        expected += weight * (down[expert] @ (F.silu(gate) * up))
    assert torch.allclose(experts_mlp(x, routing, Experts(gate_up, down))[0], expected, atol=1e-5)


def test_gpt_oss_activation() -> None:
    """Its definition, with gate and up beyond the limit."""
    gate_up = torch.tensor([[9.0, -9.0, 2.0, 8.0, 1.0, -8.0]])
    gate, up = gate_up[:, :3].clamp(max=7.0), gate_up[:, 3:].clamp(-7.0, 7.0)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    assert torch.allclose(reference.activate(gate_up, GPT_OSS), expected)


def test_gradients_flow() -> None:
    """To the tokens, through a product for each expert."""
    x = torch.randn(3, 8, requires_grad=True)
    routing = route(torch.randn(3, 4), 2, SoftmaxOver.CHOSEN)
    experts_mlp(x, routing, Experts(torch.randn(4, 12, 8), torch.randn(4, 8, 6))).sum().backward()
    assert x.grad is not None and bool((x.grad != 0).any())


def test_ranks_have_parts_of_the_sum() -> None:
    """Inner features split over ranks, down's bias on one of them."""
    whole = Experts(*(torch.randn(shape) for shape in ((5, 16, 12), (5, 12, 8), (5, 16), (5, 12))), GPT_OSS)
    x, routing = torch.randn(7, 12), route(torch.randn(7, 5), 2, SoftmaxOver.CHOSEN)
    total = torch.zeros_like(x)
    for rank, features in enumerate(torch.arange(8).split(3)):
        rows, bias = torch.cat((features, features + 8)), whole.gate_up_bias
        assert bias is not None
        down_bias = whole.down_bias if rank == 0 else None
        part = Experts(whole.gate_up[:, rows], whole.down[:, :, features], bias[:, rows], down_bias, GPT_OSS)
        total += experts_mlp(x, routing, part)
    assert relative_error(total, experts_mlp(x, routing, whole)) < 1e-6
