"""The study of spectral codecs: what it makes of blocks, and its mistakes."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.planner.moments import SideMoments
from studies import spectral


@pytest.fixture
def moments() -> list[tuple[SideMoments, SideMoments]]:
    x = torch.randn(3, 2, 32, 99, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x * torch.logspace(0, -2, 32, dtype=torch.float64)[:, None]
    side = SideMoments(*(x @ x.mT))
    return [(side, side)] * 2


@pytest.mark.parametrize("variant", spectral.VARIANTS)
def test_more_bits_leave_less_error(variant: str, moments: list[tuple[SideMoments, SideMoments]]):
    x = torch.randn(2, 256, 32) * torch.logspace(0, -2, 32)
    wide, narrow = (spectral.spectral(moments, bits, 0.3, variant, "one") for bits in (6, 2))
    assert narrow.bits <= 2 < wide.bits <= 6
    for layer, side in ((0, 0), (1, 1)):
        errors = [float((codec(layer, side, x) - x).square().mean()) for codec in (wide, narrow)]
        assert 0 < errors[0] < errors[1] < float(x.square().mean())


@pytest.mark.parametrize("words", [["--variants", "best"], ["--calibrate", "poetry"]])
def test_mistakes_are_named(words: list[str]):
    with pytest.raises(SystemExit):
        spectral.main(words)
