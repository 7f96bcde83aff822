"""Shared fixtures, and the figures that tests leave for the end of a run.

One thread: on a busy machine OpenMP workers mostly wait for each other.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from qkv_engine import Engine

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
sys.path.append(str(Path(__file__).parents[1]))  # for studies/; last, so that our kernels/ shadows no package
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with & or by a service manager
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that tests start inherit the default, not this
settings.register_profile("tests", deadline=None)  # a case may take long on a busy machine
settings.load_profile("tests")
LINES = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts folders with long files that would come last first, so that no worker is left alone with one."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent not in (here, here / "sim"))


def pytest_collection_finish() -> None:
    """Whole garbage collections, which engines and tests ask for, need not look at modules and collected tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # one of several processes, each with tests of its own
        output["figures"] = session.config.stash.get(LINES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(LINES, []).extend(getattr(node, "workeroutput", {}).get("figures", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> list[str]:
    """Lines added here stand in the terminal summary: figures to compare, and to reproduce."""
    return request.config.stash.setdefault(LINES, [])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never touch the network; a connection attempt is a failure."""
    import socket

    def refuse(*args: object) -> None:
        raise AssertionError(f"a test tried to connect: {args[1:]}")

    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family == getattr(socket, "AF_UNIX", None):
            connect(self, address)  # type: ignore[arg-type]
        else:
            refuse(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[Engine]:
    """The demo model in fp32 with fp32 KV: greedy tokens do not depend on batching."""
    from qkv_engine import Engine

    with Engine(kv="fp32", kv_memory="256MiB", max_num_seqs=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def small_engine() -> Iterator[Engine]:
    """``demo_engine`` without right answers, at a quarter of its work."""
    from qkv_engine import Engine

    from .small_demo import small_demo

    with Engine(small_demo(), kv="fp32", kv_memory="64MiB", max_num_seqs=64) as engine:
        yield engine
