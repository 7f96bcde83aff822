"""How much memory is free, and how much of it the KV cache takes when nobody says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_SHARE, CPU_LIMIT = 0.25, 4 * 2**30  # of a laptop's memory, most belongs to other programs
GPU_SHARE, GPU_WORKSPACE = 0.95, 2 * 2**30  # of a GPU's total; activations and libraries take the rest
GRAPHS_NBYTES = 2**29  # captured steps: about 1 MiB each, and what they compute in


def free_memory(device: torch.device) -> int:
    """Bytes a new allocation on ``device`` could take now."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available_ram(), _cgroup_headroom())


def default_kv_memory(device: torch.device, most: int, graphs: bool = True) -> int:
    """Bytes for the KV cache when the caller gave none; ``most`` is what all requests together could ever use.

    ``graphs``: whether a GPU's steps are captured, which takes memory, too.
    """
    free = free_memory(device)
    if device.type == "cuda":
        import torch

        total = torch.cuda.mem_get_info(device)[1]
        others = int((1 - GPU_SHARE) * total) + GPU_WORKSPACE + graphs * GRAPHS_NBYTES
        return max(1, min(most, free - others))
    return max(1, min(most, int(CPU_SHARE * free), CPU_LIMIT))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an allocation that found no memory, on any device."""
    import torch

    # torch has no type of its own for an allocation that fails on the CPU.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS has no count of available pages


def _cgroup_headroom() -> int:
    """Bytes left under a container's limit; very large where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
