"""Shared fixtures. One thread: on a busy machine OpenMP workers mostly wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from qkv_engine import Engine

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start


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
