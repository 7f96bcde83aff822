"""Launches of ``studies/kernels/bench_states.py`` at small sizes for Triton's interpreter: their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from qkv_engine.kernels.delta_net import StateSpec
from studies.kernels import bench_states
from studies.kernels.bench_states import Timed, chunks, steps
from tests.kernels.interpreted import report

from .tiles_cases import counted

SPEC = StateSpec(1, 2, 32, 32, 4)


def worst(rows: Callable[[], Iterator[Timed]]) -> float:
    """The largest error, after all have run."""
    torch.manual_seed(0)
    with patch.object(bench_states, "time_calls", counted):
        return max(row.error for row in rows())


def cases() -> dict[str, Callable[[], float]]:
    return {"steps": lambda: worst(lambda: steps(SPEC, 3)), "chunks": lambda: worst(lambda: chunks(SPEC, 140, 2))}


if __name__ == "__main__":
    report(cases())
