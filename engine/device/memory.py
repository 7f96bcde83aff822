"""Free memory, and the default size of the KV cache."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOMEM
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CapacityError, QKVError
from ..sizes import format_size

if TYPE_CHECKING:
    import torch

CPU_SHARE_OF_BOTH = 0.5  # of free memory, for weights and KV together
CPU_SHARE, CPU_LIMIT = 0.25, 4 * 2**30  # of free memory, and bytes at most: the rest is for other programs
GPU_SHARE, GPU_WORKSPACE = 0.95, 2 * 2**30  # of a GPU's total, and bytes: activations and libraries take the rest
GRAPHS_NBYTES = 2**30  # for CUDA graphs: about 1 MiB each, and their pool of temporaries
UNLIMITED = 2**62  # bytes of headroom where nothing limits the process


class _CgroupFiles(NamedTuple):
    """Names of one version's files in a memory cgroup's folder; ``cache`` is a line of memory.stat."""

    mount: str
    limit: str
    usage: str
    cache: str


_V1 = _CgroupFiles("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_memory(device: torch.device) -> int:
    """Bytes a new allocation on ``device`` could take now."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, min(_available_ram(), cgroup_headroom(), _address_space_left()))


def default_kv_memory(device: torch.device, most: int, graphs: bool = True) -> int:
    """Bytes of the KV cache when the caller gave none; ``most`` is the most that all requests could ever use.

    Counts the memory that is free now, so weights must be loaded first. ``graphs``: leave room for CUDA graphs.
    """
    free = free_memory(device)
    if device.type == "cuda":
        import torch

        total = torch.cuda.mem_get_info(device)[1]
        others = int((1 - GPU_SHARE) * total) + GPU_WORKSPACE + graphs * GRAPHS_NBYTES
        return max(1, min(most, free - others))
    return max(1, min(most, int(CPU_SHARE * free), CPU_LIMIT))


def default_memory(device: torch.device, graphs: bool = True) -> int:
    """Bytes for weights and KV together when the caller gave none; both are still to be allocated."""
    if device.type == "cuda":
        return default_kv_memory(device, UNLIMITED, graphs)
    return int(CPU_SHARE_OF_BOTH * free_memory(device))


def check_free(nbytes: int, free: int, device: torch.device, *, field: str, value: object) -> None:
    """Raises ``CapacityError`` if the option ``field`` asks for more ``nbytes`` than are ``free`` on ``device``."""
    if nbytes > free:
        message = f"{format_size(nbytes)} asked for, {format_size(free)} free on {device}"
        raise CapacityError(message, field=field, value=value, remedy=f"Lower {field}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation found no memory, on any device."""
    import torch

    # torch has no type of its own for an allocation that fails on the CPU.
    words = "can't allocate memory", "not enough memory"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == ENOMEM:
        return True
    return any(text in str(error) for text in words)


@contextmanager
def memory_or_error(message: str, *, field: str | None = None, value: object = None, remedy: str) -> Iterator[None]:
    """Raises ``CapacityError``, of the words given, where the system does not give the memory asked for."""
    try:
        yield
    except Exception as error:
        if isinstance(error, QKVError) or not is_out_of_memory(error):
            raise
        raise CapacityError(message, field=field, value=value, remedy=remedy) from error


def cgroup_headroom(root: Path = Path("/")) -> int:
    """Bytes left under the limits of this process's memory cgroups, of version 1 and 2; ``UNLIMITED`` without any.

    A limit binds everything below it, so the process's own group and all around it count. Page cache that nobody uses
    is given up before anything fails and counts as free. ``root`` is where /proc and /sys are looked for.
    """
    return min((_headroom(folder, files) for folder, files in _memory_cgroups(root)), default=UNLIMITED)


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS has no count of available pages


def _address_space_left() -> int:
    """Bytes of addresses left under ``ulimit -v``; ``UNLIMITED`` without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return UNLIMITED
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        in_use = 0
    return limit - in_use


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Folders of the process's memory cgroups up to the mounts; in a container only some of them may be in sight."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2 names no controllers
            files = _V1 if controllers else _V2
            group = PurePosixPath("/", *(part for part in PurePosixPath(path).parts if part != ".."))
            for folder in (group, *group.parents):
                yield root / files.mount / folder.relative_to("/"), files


def _headroom(folder: Path, files: _CgroupFiles) -> int:
    try:
        limit, usage = (int((folder / name).read_text()) for name in (files.limit, files.usage))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - usage + int(stat.get(files.cache, 0))
    except (OSError, ValueError):  # no such folder, or "max" for no limit
        return UNLIMITED
