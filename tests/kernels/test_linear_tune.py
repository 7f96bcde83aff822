"""The search for the fastest matrix product: who wins a race, and on a GPU that winners give torch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qkv_engine.kernels.linear import fastest_product
from qkv_engine.kernels.linear.cublaslt import cublaslt
from qkv_engine.kernels.linear.tune import FINALISTS, FIRST_RUNS, NEARBY, WORTH, race
from qkv_engine.models.layers import Linear, tune

gpu = pytest.mark.gpu


def run_race(heats: list[float], finals: list[float], usual: float) -> tuple[Any, list[tuple[Any, int]]]:
    """The winner among products 0, 1, ..., and who ran how often."""
    runs: list[tuple[Any, int]] = []

    def seconds(run: Any, number: int) -> float:
        runs.append((run, number))
        if run == "usual":
            return usual
        return heats[run] if number == FIRST_RUNS else finals[run]

    return race(list(range(len(heats))), "usual", seconds, 12), runs  # type: ignore[arg-type, return-value]


def test_the_long_race_decides():
    assert run_race([3, 1, 2], [1.5, 1.2, 1.0], 2.0)[0] == 2


def test_only_the_first_of_the_short_race_run_the_long_one():
    number = FINALISTS + 3
    heats, finals = [float(number - i) for i in range(number)], [0.1] * 3 + [1.0] * FINALISTS
    finals[4] = 0.9
    winner, runs = run_race(heats, finals, 2.0)
    assert winner == 4  # those faster still were out by then
    assert {run for run, n in runs if n == 12} == {"usual", *range(3, number)}


@pytest.mark.parametrize(("best", "winner"), [(WORTH * 2.0 - 0.001, 0), (WORTH * 2.0 + 0.001, None), (3.0, None)])
def test_a_product_has_to_be_worth_it(best: float, winner: int | None):
    assert run_race([1.0], [best], 2.0)[0] == winner


def test_a_race_of_nobody_has_no_winner():
    assert run_race([], [], 2.0)[0] is None


def test_nothing_is_searched_on_the_cpu():
    weights = [torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(2)]
    assert cublaslt(weights[0].device, weights[0].dtype) is None
    assert fastest_product(weights, 200) is None


def test_a_layer_uses_a_product_for_its_number_of_rows_alone():
    layer = Linear(8, {"a": 4}, bias=False)
    torch.nn.init.normal_(layer.weight)
    layer.products[3] = lambda x, weight: torch.full((len(x), len(weight)), 7.0)  # type: ignore[assignment]
    assert layer(torch.ones(3, 8)).eq(7.0).all()
    x = torch.randn(2, 8)
    assert torch.allclose(layer(x), F.linear(x, layer.weight))


def test_layers_alike_share_what_is_found(monkeypatch):
    searched = []

    def find(weights: list[torch.Tensor], num_rows: int) -> str:
        searched.append((len(weights), tuple(weights[0].shape), num_rows))
        return f"product {len(searched)}"

    monkeypatch.setattr("qkv_engine.models.layers.fastest_product", find)
    shapes = [(4, 8), (4, 8), (8, 4), (8, 4), (16, 4)]
    layers = [Linear(i, {"a": o}, bias=False) for o, i in shapes]
    biased = [Linear(8, {"a": 4}, bias=True) for _ in range(2)]
    tune(torch.nn.ModuleList([*layers, *biased]), 24)
    assert searched == [(2, (4, 8), 24), (2, (8, 4), 24)]
    assert [layer.products for layer in layers[:4]] == [{24: "product 1"}] * 2 + [{24: "product 2"}] * 2
    assert not any(layer.products for layer in [layers[4], *biased])


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 200])
@pytest.mark.parametrize(("num_out", "num_in"), [(4096, 12288), (6144, 4096), (48, 136)])
def test_products_give_torchs_bits(num_out, num_in, num_rows, dtype):
    """Of every kernel, whether it wins or not, those that pass the test on two weights pass it on others."""
    library = cublaslt(torch.device("cuda", 0), dtype)
    assert library is not None
    generator = torch.Generator("cuda").manual_seed(num_rows)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device="cuda")

    weights, xs = [make(num_out, num_in) for _ in range(3)], [make(num_rows, num_in) for _ in range(3)]
    expected = [F.linear(x, weight) for x, weight in zip(xs, weights, strict=True)]
    nearby = tuple(num_rows + d for d in NEARBY if num_rows + d > 0)
    num_same = 0
    for product in library.products(weights[0], num_rows, nearby):
        same = [torch.equal(product(x, w), out) for x, w, out in zip(xs, weights, expected, strict=True)]
        assert all(same) == (same[0] and same[1])
        error = max(float((product(x, w) - out).abs().max()) for x, w, out in zip(xs, weights, expected, strict=True))
        assert error <= 2 * float(expected[0].abs().max()) * torch.finfo(dtype).eps
        num_same += all(same)
    assert num_same


@gpu
def test_a_product_is_captured_and_takes_any_input():
    weights = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    library = cublaslt(torch.device("cuda", 0), torch.bfloat16)
    assert library is not None
    found = list(library.products(weights[0], 24, (16, 32)))
    x = torch.randn(25, 4096, dtype=torch.bfloat16, device="cuda")
    graph, out = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = [product(x[:24], weight) for product in found for weight in weights]
    x.normal_()
    graph.replay()
    for i, result in enumerate(out):
        expected = x[:24].double() @ weights[i % 3].double().T
        assert (result.double() - expected).norm() <= 4e-3 * expected.norm()
    odd = torch.randn(24 * 4096 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(24, 4096)
    assert torch.equal(found[0](odd, weights[0]), F.linear(odd, weights[0]))
