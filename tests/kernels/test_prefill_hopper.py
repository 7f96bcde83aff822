"""Prefill attention for Hopper: which launches it takes, and its compiled size; ``tests/gpu`` has its results."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

from qkv_engine.kernels.nvidia import LARGE_SHARED_NBYTES
from qkv_engine.kernels.paged_prefill import hopper
from studies.kernels.compiled import compile_kernel, describe
from studies.kernels.compiled_attention import hopper_kernels
from studies.kernels.inputs import dense_page

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def suits(
    dtype: torch.dtype = BF16,
    head_dim: int = 256,
    block_m: int = 128,
    window: int | None = None,
    softcap: float | None = None,
    queries: torch.dtype = BF16,
) -> bool:
    return hopper.suits(dense_page(dtype, 2, head_dim), queries, block_m, window, softcap, torch.device("cpu"))


def test_takes_large_tiles_of_16_bits_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, with a Triton that has compiled it."""
    set_version(monkeypatch, "3.6.0")
    assert not suits()
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert suits() and suits(FP16)
    assert not suits(FP32) and not suits(queries=FP32)
    assert not suits(head_dim=192) and not suits(head_dim=128) and not suits(block_m=64)
    assert not suits(window=4096) and not suits(softcap=50.0)
    for version, is_known in (
        ("3.5.1", False),
        ("3.8rc1", True),
        ("3.9.0", False),
        ("3.10.0", False),
        ("4.0.0", False),
    ):
        set_version(monkeypatch, version)
        assert suits() == is_known, version
    hopper.has_gluon.cache_clear()


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    hopper.has_gluon.cache_clear()


def test_fits_without_spills() -> None:
    found = [describe(compile_kernel(*variant)) for _, *variant in hopper_kernels()]
    assert [each["HGMMA"] for each in found] == [60, 40]  # 16 of scores and 4 with V: first and last tile, 2 loops or 1
    for each in found:
        assert each["shared"] <= LARGE_SHARED_NBYTES and each["spilled"] <= 16 and each["overwritten"] == 0
