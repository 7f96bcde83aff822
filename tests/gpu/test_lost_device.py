"""A GPU that computes nothing any more ends the engine at once, with the device's own words."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# In a process of its own: after a device-side assertion the process can never use the GPU again.
PROGRAM = """
import torch
from qkv_engine import Engine, EngineDeadError, SamplingParams
from qkv_engine.device.runner import Runner

launch, steps = Runner.launch, []

def broken(self, batch, rows):
    steps.append(1)
    if len(steps) == 20:
        torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]
    return launch(self, batch, rows)

Runner.launch = broken
engine = Engine(kv_memory="256MiB", device="cuda", cuda_graphs=False)
streams = [engine.stream([5, 6, i], SamplingParams(max_tokens=500, ignore_eos=True)) for i in range(5, 9)]
found = []
for stream in streams:
    try:
        list(stream)
    except EngineDeadError as error:
        found.append(str(error))
try:
    engine.generate([[5]])
except EngineDeadError as error:
    found.append(str(error))
assert len(found) == 5 and len(set(found)) == 1, found
assert "cuda:0 is lost" in found[0] and "assert" in found[0], found
engine.close()
print("dead", len(steps))
"""


def test_a_device_side_assertion_ends_the_engine():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("dead") and done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[1]) < 60  # not request by request
