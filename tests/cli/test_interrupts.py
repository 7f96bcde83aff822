"""Ctrl-C and SIGTERM at any moment from the first import to the last weight: the right code, and not a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

# The program as its entry point runs it, saying on stderr which modules have been imported.
PYTHON = [sys.executable, "-X", "importtime"]
PROGRAM = [*PYTHON, "-c", "import sys; from qkv_engine.cli import run; sys.exit(run())"]
MODULE = [*PYTHON, "-m", "qkv_engine"]
SLOW = ("bench", "--shape", "mistral-7b", "--dtype", "bfloat16", "--device", "cpu", "--kv-memory", "64MiB")
IMPORTED = b"import time:"
CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM)}  # a shell shows both alike


@contextmanager
def program(*words: str, start: Sequence[str] = PROGRAM) -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([*start, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for_import(child: subprocess.Popen[bytes], module: str) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        assert line.startswith(IMPORTED), line
        if line.rsplit(b"|", 1)[1].strip() == module.encode():
            return
    raise AssertionError(f"{module} was never imported")


def ends_silently(child: subprocess.Popen[bytes], number: signal.Signals, seconds: float) -> None:
    begun = time.monotonic()
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    said = [line for line in err.splitlines() if not line.startswith(IMPORTED)]
    assert (child.returncode in CODES[number], out, said) == (True, b"", []), (child.returncode, out, said)
    assert time.monotonic() - begun < seconds


def quick(quick_pairs: Sequence[tuple[Any, ...]], all_pairs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All pairs as parameters, those that are not quick in ``make test-full`` alone."""
    slow = [pytest.param(*pair, marks=pytest.mark.slow) for pair in all_pairs if pair not in quick_pairs]
    return [*quick_pairs, *slow]


MODULES = ("argparse", "qkv_engine.cli.main", "numpy", "torch._C", "torch", "qkv_engine.kernels")
WHILE_IMPORTED = [
    *((module, signal.SIGINT) for module in ("argparse", "torch._C")),
    *((module, signal.SIGTERM) for module in ("qkv_engine.cli.main", "qkv_engine.kernels")),
]
WHILE_LOADED = [(0.7, signal.SIGINT)]  # with seconds after the last import


@pytest.mark.parametrize(("module", "number"), quick(WHILE_IMPORTED, product(MODULES, CODES)))
def test_while_modules_are_imported(module: str, number: signal.Signals):
    """Torch, interrupted inside, would abort: the rest of its import is waited for."""
    with program(*SLOW) as child:
        wait_for_import(child, module)
        ends_silently(child, number, 30)


def test_as_a_module_too():
    with program("env", start=MODULE) as child:
        wait_for_import(child, "argparse")
        ends_silently(child, signal.SIGINT, 30)


@pytest.mark.parametrize(("delay", "number"), quick(WHILE_LOADED, product((0.0, 0.1, 0.7, 2.0), CODES)))
def test_while_a_large_model_loads(delay: float, number: signal.Signals):
    with program(*SLOW) as child:
        wait_for_import(child, "qkv_engine.engine")
        time.sleep(delay)
        ends_silently(child, number, 15)


def test_a_second_ctrl_c_does_not_abort():
    with program(*SLOW) as child:
        wait_for_import(child, "qkv_engine.engine")
        time.sleep(1.5)
        child.send_signal(signal.SIGINT)
        time.sleep(0.01)
        ends_silently(child, signal.SIGINT, 15)


def test_a_program_started_to_ignore_ctrl_c_does():
    """A shell starts background jobs of scripts like this."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with program("env", "-o", "json") as child:
            signal.signal(signal.SIGINT, previous)
            for module in ("qkv_engine.cli.main", "numpy", "torch"):
                wait_for_import(child, module)
                child.send_signal(signal.SIGINT)
            out, _ = child.communicate(timeout=60)
            assert child.returncode == 0 and b"versions" in out
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_tests_themselves_take_ctrl_c_though_they_were_started_to_ignore_it():
    """As ``make test &`` in a script, or a service manager, starts them: what they start would ignore it, too."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import tests.conftest; signal.raise_signal(2)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
