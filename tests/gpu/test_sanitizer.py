"""Small launches of every kernel under compute-sanitizer: no byte out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CHILD = [sys.executable, "-m", "tests.gpu.small_cases"]
SUMMARIES = {"memcheck": r"ERROR SUMMARY: 0 errors", "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors"}


def run(command: list[str]) -> str:
    """Output of a program that ends well; each allocation on the device its own, so that a step beyond it is seen."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def _compiled() -> None:
    """The cases run as they are, and Triton's cache holds their kernels; none is left out."""
    assert "did not run: []" in run(CHILD)


@pytest.mark.parametrize("tool", SUMMARIES)
def test_small_cases(tool: str, _compiled: None, report: list[str]) -> None:
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    start = time.monotonic()
    output = run([program, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9", *CHILD])
    report.append(f"{tool}: {time.monotonic() - start:.0f} s")
    assert re.search(SUMMARIES[tool], output), output[-6000:]
