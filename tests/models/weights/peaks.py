"""Peak memory of a load, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from qkv_engine.models.loader import expected_tensors, find_model
from qkv_engine.models.registry import build_model

CODE = """
import re, sys, torch
from pathlib import Path
from dataclasses import replace
from qkv_engine.loading import with_weights
from qkv_engine.models import loader
from qkv_engine.models.weights.on_load import OnLoad
folder, weights, load_format, is_unpacked = sys.argv[1:]
cpu, dtype = torch.device("cpu"), torch.bfloat16
loader.is_unpacked = lambda device: is_unpacked == "True"
found = loader.find_model(folder, load_format=load_format)
status = Path("/proc/self/status")  # rusage has the peak of the process that started this one, too
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) / 1024
source = replace(found, config=with_weights(found.config, weights or None))
OnLoad("int8").build({"weight": torch.ones(8192, 1024).bfloat16()}, torch.bfloat16)
before = peak()
loader.load_weights(source, dtype=dtype, device=cpu, load_format=load_format)
print(peak() - before, loader.weights_nbytes(source.config, dtype, device=cpu) / 2**20)
"""


def load_peak(
    folder: Path, weights: str | None = None, load_format: str = "auto", *, is_unpacked: bool = False
) -> tuple[float, float]:
    """MiB that a load in bfloat16 takes at most, and those that it keeps.

    What one matrix takes while it is quantized is in memory before.
    """
    # The C library would keep freed pieces of matrices, more or fewer by chance; of this size it returns them at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CODE, str(folder), weights or "", load_format, str(is_unpacked)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak, kept = map(float, run.stdout.split())
    return peak, kept


def write_ones(folder: Path) -> None:
    """A plain checkpoint of ones for the config.json in ``folder``."""
    config = find_model(str(folder)).config
    wanted = expected_tensors(build_model(config), config)
    ones = {name: torch.ones(parts[0].shape, dtype=torch.bfloat16) for name, parts in wanted.items()}
    save_file(ones, folder / "model.safetensors")
