"""Checkpoints that several ranks load, each its part."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from qkv_engine.models.loader import find_model, load_weights
from qkv_engine.models.ranks import Ranks

from ..conftest import CPU
from ..test_ranks import logits_of, on_ranks


def logits_on_ranks(folder: Path, size: int) -> list[Tensor]:
    """The logits that each of ``size`` ranks computes with its part of the weights in ``folder``."""
    found = find_model(str(folder))

    def run(ranks: Ranks) -> Tensor:
        return logits_of(load_weights(found, dtype=torch.float32, device=CPU, ranks=ranks), ranks)

    return on_ranks(size, run)


def check_two_ranks(folder: Path) -> None:
    """Two ranks compute the logits of one."""
    (expected,) = logits_on_ranks(folder, 1)
    for logits in logits_on_ranks(folder, 2):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
