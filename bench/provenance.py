"""The origin of a row of measurements: commit, versions, machine, date, command; and the counters of its engine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qkv_engine

from .timing import rounded

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats

_CHECKOUT = Path(qkv_engine.__file__).resolve().parents[1]  # of an installed wheel site-packages, which is none
_SOURCES = ("engine", "scheduler", "kernels", "models", "cli", "bench", "pyproject.toml")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The code, the machine and the settings of a measurement.

    ``commit`` is the checkout's short hash, with "+" where its sources have changed since; None for a wheel.
    ``date`` is UTC in ISO 8601. ``command`` is the command line, None where a program used the engine. ``driver`` is
    the version of NVIDIA's kernel module. ``device`` is "cpu" or "cuda:N", ``device_name`` the product's name.
    ``threads`` are those of the CPU, ``dtype`` is that of the weights, ``seed`` that of prompts and random weights.
    """

    engine_version: str | None = None
    commit: str | None = None
    torch_version: str | None = None
    triton_version: str | None = None
    python_version: str | None = None
    driver: str | None = None
    date: str | None = None
    command: str | None = None
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
        "engine_version": qkv_engine.__version__,
        "commit": commit(),
        "torch_version": str(torch.__version__),
        "triton_version": _triton(),
        "python_version": platform.python_version(),
        "driver": driver() if device is not None and device.startswith("cuda") else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "device": device,
        "device_name": None if device is None else device_name(device),
        "threads": threads,
        "dtype": dtype,
        "seed": seed,
    }


def engine_values(stats: EngineStats, seed: int | None = None) -> dict[str, Any]:
    """Fields of a row from the counters of its engine: origin, KV memory, effective bits, demotions, preemptions."""
    return {
        **provenance(device=stats.device, dtype=stats.dtype, threads=stats.num_threads, seed=seed),
        "kv_bytes_total": stats.kv_bytes_total,
        "effective_bits": rounded(stats.effective_bits),
        "demotions": stats.num_demotions,
        "preemptions": stats.num_preemptions,
    }


def block_bits(stats: EngineStats) -> float | None:
    """Bits of an element in a block on the last rung of an engine's ladder, all metadata counted."""
    return rounded(list(stats.kv_rungs.values())[-1])


@cache
def commit(checkout: Path = _CHECKOUT) -> str | None:
    """The short hash of ``checkout`` when it was first asked for, with "+" where its sources differ from that commit.

    None without a repository or without git.
    """

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=False, timeout=10
        )

    if not (checkout / ".git").exists():
        return None
    try:
        found = git("rev-parse", "--short", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", *_SOURCES).returncode != 0
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found.stdout.strip()}{'+' * changed}" if found.returncode == 0 else None


def command_line() -> str | None:
    """The command line of this process where it is ``qkv-engine``."""
    return shlex.join(["qkv-engine", *sys.argv[1:]]) if Path(sys.argv[0]).name == "qkv-engine" else None


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's kernel module, such as "580.159.04"; None where ``path`` does not tell it."""
    try:
        found = re.search(r"\b\d+(?:\.\d+)+\b", path.read_text("utf-8"))
    except (OSError, UnicodeError):
        return None
    return found[0] if found else None


@cache
def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


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
