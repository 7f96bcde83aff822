"""Copies between host and device that make neither wait for the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host. On the CPU it is the tensor itself."""

    def __init__(self, source: Tensor):
        self._tensor, self._done = source, None
        if source.is_cuda:
            self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._tensor.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> Tensor:
        """Blocks until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor


def to_device(parts: Sequence[bytes | bytearray], device: torch.device) -> list[Tensor]:
    """Each part as a uint8 tensor on the device, aligned to 16 bytes; all of them, not empty, travel in one copy."""
    starts, buffer = [], bytearray()
    for part in parts:
        starts.append(len(buffer))
        buffer += part
        buffer += bytes(-len(part) % 16)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return [tensor[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
