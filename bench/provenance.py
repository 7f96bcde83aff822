"""Where a row of measurements comes from: versions, machine, date."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from qkv_engine import __version__


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a row was measured with.

    ``date`` is UTC in ISO 8601, ``device`` "cpu" or "cuda:N", ``device_name`` the product's name, ``threads`` those of
    the CPU, ``dtype`` that of the weights, ``seed`` that of prompts and random weights.
    """

    engine_version: str | None = None
    torch_version: str | None = None
    date: str | None = None
    device: str | None = None
    device_name: str | None = None
    threads: int | None = None
    dtype: str | None = None
    seed: int | None = None

    @property
    def machine(self) -> str | None:
        """The device in words, for titles."""
        if self.device != "cpu" or not self.threads:
            return self.device_name or self.device
        return f"{self.device_name or self.device}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def provenance(
    *, device: str | None = None, dtype: str | None = None, threads: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """The fields of ``Provenance`` as of now; no device, dtype and threads where nothing ran."""
    import torch

    return {
        "engine_version": __version__,
        "torch_version": str(torch.__version__),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "device_name": None if device is None else device_name(device),
        "threads": threads,
        "dtype": dtype,
        "seed": seed,
    }


def device_name(device: str) -> str:
    """The product's name of a device, such as "NVIDIA H200" or "AMD EPYC 7763 64-Core Processor"."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return cpu_name()


@cache
def cpu_name() -> str:
    """The CPU's model name without trademark signs; its architecture where the system does not tell the model."""
    name = _linux_cpu() or _macos_cpu() or platform.processor() or platform.machine()
    return " ".join(re.sub(r"\((?:R|TM|C)\)", "", name, flags=re.IGNORECASE).split())


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _linux_cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeError):
        return ""
    return found[1].strip() if found else ""


def _macos_cpu() -> str:
    if platform.system() != "Darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
    return done.stdout.strip()
