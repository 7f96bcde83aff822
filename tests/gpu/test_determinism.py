"""A deterministic engine on a GPU: the same tokens alone and in batches, by products whose rows are the same bits."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.kernels.linear import linear, pack_steadily

from ..engine.test_determinism import EAGER_AT_ONCE, alone, asks, open_engine, together

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv", ["bf16", "int8", "kivi-2", "kitty-pro", EAGER_AT_ONCE], ids=str)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_300_requests_have_the_same_tokens(kv, cuda_graphs: bool, report: list[str]):
    wanted = asks(300, seed=300, most_tokens=40)
    options = {"dtype": "bfloat16", "device": "cuda", "cuda_graphs": cuda_graphs}
    with open_engine(kv, prefix_caching=False, **options) as engine:
        expected = alone(engine, wanted)
    with open_engine(kv, max_num_batched_tokens=300, **options) as engine:
        found = together(engine, wanted, seed=1)
    tokens = [[answer[0] for answer in answers] for answers in (found, expected)]
    report.append(
        f"{kv}: {sum(a != b for a, b in zip(found, expected, strict=True))} of 300 with other log-probabilities"
    )
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_out", "size"), [(4096, 4096), (6144, 2560), (12352, 2560), (24576, 1024), (37, 200)])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(dtype, num_out: int, size: int):
    x, weight = (torch.randn(n, size, device="cuda").to(dtype) for n in (600, num_out))
    steady = pack_steadily(weight)
    whole = linear(x, steady)
    exact = x.double() @ weight.double().T
    assert (whole.double() - exact).norm() <= 1e-2 * exact.norm()
    for number in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300):
        for first in (0, 1, 600 - number):
            assert torch.equal(linear(x[first : first + number].clone(), steady), whole[first : first + number])
