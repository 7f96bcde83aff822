"""Whether a device is an NVIDIA GPU: torch's devices of type "cuda" are AMD's, too."""

from __future__ import annotations

import torch


def is_nvidia(device: torch.device) -> bool:
    """Whether ``device`` is an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None
