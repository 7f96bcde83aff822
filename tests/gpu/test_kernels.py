"""Every kernel against its reference over random shapes and rungs, with NaN wherever nobody wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from qkv_engine.kernels.sample import triton as sample_kernels

from .kernel_cases import CASES, Figure

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic")]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until they are written; what cases set for a kernel is undone."""
    monkeypatch.setattr(sample_kernels, "PROGRAMS", sample_kernels.PROGRAMS)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_random_cases(case: Callable[[int], Figure], report: list[str]) -> None:
    errors: dict[int, str] = {}
    worst = (0.0, 0.0)
    for seed in range(CASES[case]):
        torch.manual_seed(seed)
        try:
            error, bound = case(seed)
        except (AssertionError, RuntimeError) as broken:
            errors[seed] = f"{type(broken).__name__}: {broken}"[:500]
            continue
        if not error <= bound:
            errors[seed] = f"{error:.2e} > {bound:.2e}"
        worst = max(worst, (error / (bound or 1.0), error))
    report.append(f"{case.__name__:14} {CASES[case]:3} cases, worst error {worst[1]:.2e}, {worst[0]:.2f} of its bound")
    assert not errors
