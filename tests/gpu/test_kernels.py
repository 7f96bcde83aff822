"""Every kernel against its reference over random shapes and rungs, with NaN wherever nobody wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from qkv_engine.kernels.sample import triton as sample_kernels

from .kernel_cases import CASES, Figure

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic")]
SEEDS = [  # most compile kernels of their own, so that the second half is slow
    pytest.param(case, seed, id=f"{case.__name__}-{seed}", marks=[pytest.mark.slow] if seed > (number - 1) // 2 else [])
    for case, number in CASES.items()
    for seed in range(number)
]


@pytest.fixture(scope="module")
def _shares(report: list[str]) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """By kernel, each case's share of its bound and its error; the worst are reported."""
    found: dict[str, list[tuple[float, float]]] = {}
    yield found
    for name, shares in found.items():
        share, error = max(shares)
        report.append(f"{name}: {len(shares)} cases, worst error {error:.2e}, {share:.2f} of what is allowed")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until they are written; what cases set for a kernel is undone."""
    monkeypatch.setattr(sample_kernels, "PROGRAMS", sample_kernels.PROGRAMS)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("case", "seed"), SEEDS)
def test_random_case(case: Callable[[int], Figure], seed: int, _shares: dict[str, list[tuple[float, float]]]) -> None:
    torch.manual_seed(seed)
    error, bound = case(seed)
    _shares.setdefault(case.__name__, []).append((error / (bound or 1.0), error))
    assert error <= bound
