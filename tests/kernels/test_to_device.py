"""Copies of host tensors in the calling thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv_engine.kernels.to_device import ALIGNMENT, copy_here, parts_of

TENSORS = {
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "scalar": torch.tensor(4),
    "empty": torch.zeros(0, 3),
    "empty, of NumPy": torch.zeros(0).as_strided((0,), (0,)),
    "bools": torch.tensor([True, False]),
    "transposed": torch.arange(12).view(3, 4).T,
    "part of a row": torch.arange(40)[3:11:2],
}


@pytest.mark.parametrize("source", TENSORS.values(), ids=TENSORS)
def test_every_element_is_copied(source: Tensor) -> None:
    target = torch.empty(source.shape, dtype=source.dtype)
    copy_here(target, source)
    assert torch.equal(target, source)


def test_tensors_of_one_copy_lie_apart_and_aligned() -> None:
    memory = torch.zeros(400, dtype=torch.uint8)
    parts = parts_of(memory, list(TENSORS.values()))
    for part, source in zip(parts, TENSORS.values(), strict=True):
        assert part.dtype == source.dtype and (part.data_ptr() - memory.data_ptr()) % ALIGNMENT == 0
        copy_here(part, source)
    assert all(torch.equal(part, source) for part, source in zip(parts, TENSORS.values(), strict=True))
