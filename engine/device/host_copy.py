"""Asynchronous device-to-host copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CopyToHost:
    """An asynchronous copy of a tensor to the host; on the CPU the tensor itself."""

    def __init__(self, source: Tensor):
        self._tensor, self._done = source, None
        if source.is_cuda:
            self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._tensor.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[Any]:
        """The tensor's elements, in nested lists. Blocks until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor.tolist()
