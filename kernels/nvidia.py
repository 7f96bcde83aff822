"""What an NVIDIA GPU has; torch's devices of type "cuda" are AMD's, too."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LARGE_SHARED_NBYTES = 220 << 10  # Hopper and Blackwell for data centers have 227 KiB, others 99 to 163


def is_nvidia(device: torch.device) -> bool:
    """Whether ``device`` is an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None


@cache
def has_large_shared(device: torch.device) -> bool:
    """Whether a program may have ``LARGE_SHARED_NBYTES`` of shared memory."""
    if not is_nvidia(device):
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= LARGE_SHARED_NBYTES)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has Hopper's bulk copies and asynchronous tensor cores, for which some tiles are made."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device)[0] == 9
