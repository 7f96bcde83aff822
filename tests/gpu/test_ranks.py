"""Ranks on two GPUs, over NCCL: one that dies or stands still ends the engine, and ``close`` does not wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# In a process of its own: a kernel of NCCL that waits for a lost rank may hold its GPU until the process ends.
PROGRAM = """
import os, signal, sys, time
from qkv_engine import Engine, EngineDeadError, RankLostError, SamplingParams
from qkv_engine.parallel import worker_group
from qkv_engine.parallel.watch import Patience

def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False

case = sys.argv[1]
if case == "stopped":
    worker_group.PATIENCE = Patience(silent=4, tick=0.2)
engine = Engine(kv_memory="256MiB", device="cuda", tensor_parallel=2)
pid = engine._started.workers._workers[0].process.pid
stream = engine.stream([5, 6, 7], SamplingParams(max_tokens=2000, ignore_eos=True))
for _ in range(20):
    next(stream)
os.kill(pid, signal.SIGKILL if case == "killed" else signal.SIGSTOP)
start = time.monotonic()
if case == "closed":
    engine.close()
    expected = "closed"
else:
    expected = "rank 1 ended with code -9" if case == "killed" else "rank 1 stands still: no answer for 4 s"
try:
    list(stream)
except (RankLostError, EngineDeadError) as error:
    assert expected in str(error), error
else:
    raise AssertionError("the stream ended")
seconds = time.monotonic() - start
try:
    engine.generate([[5]])
except EngineDeadError:
    pass
engine.close()
for _ in range(100):
    if has_ended(pid):
        break
    time.sleep(0.1)
assert has_ended(pid)
print(f"{seconds:.2f}")
"""
LONGEST = {"killed": 10.0, "stopped": 20.0, "closed": 60.0}  # seconds, of a machine with other work


@pytest.mark.parametrize("case", LONGEST)
def test_a_lost_rank_ends_the_engine(case: str, report: list[str]) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = subprocess.run([sys.executable, "-c", PROGRAM, case], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    report.append(f"a rank that is {case}: {float(done.stdout):.1f} s")
    assert float(done.stdout) < LONGEST[case]
