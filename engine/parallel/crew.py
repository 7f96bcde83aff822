"""The worker processes of a tensor-parallel engine, as rank 0 drives them."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import IO

import torch
from torch.distributed import TCPStore

from ..config import EngineConfig
from ..errors import CapacityError, DeviceLostError, QKVError
from .process_ranks import ProcessRanks

HOST = "127.0.0.1"
END_SECONDS = 5.0  # for a worker to end by itself
LAST_CHARS = 2000  # of a worker's messages, in the error that says why it ended


class Worker:
    """The process of one rank, and the connection that its commands go through."""

    def __init__(self, rank: int):
        self.rank = rank
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "qkv_engine.parallel.worker", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for rank 0
            )
        self.connection = Connection(ours.detach())

    def receive(self) -> object:
        """The worker's next reply. Raises ``DeviceLostError`` if there will be none."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.wait()
            raise DeviceLostError(self.last_words(), remedy="Make a new engine") from error

    def last_words(self) -> str:
        """Why the process ended, once it has."""
        self._messages.seek(0)
        text = self._messages.read().decode(errors="replace").strip()
        return f"rank {self.rank} ended with code {self.process.returncode}: {text[-LAST_CHARS:] or 'no message'}"

    def end(self) -> None:
        """Ends the process and waits for it."""
        with suppress(OSError):
            self.connection.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Crew:
    """All workers of an engine. One that ends before ``close`` makes every later call raise ``DeviceLostError``."""

    def __init__(self, config: EngineConfig, device: torch.device):
        """Starts the workers of ``config.tensor_parallel`` - 1 ranks, which load their parts of the weights."""
        self._store = TCPStore(HOST, 0, config.tensor_parallel, is_master=True, wait_for_workers=False)
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _end_all, self._workers)
        self._lost: str | None = None
        self.ranks: ProcessRanks | None = None
        self._size, self._device = config.tensor_parallel, device
        try:
            for rank in range(1, config.tensor_parallel):
                self._workers.append(worker := Worker(rank))
                worker.connection.send_bytes(pickle.dumps((config, rank, device.type, self._store.port)))
        except BaseException:
            self.close()
            raise

    def join(self) -> ProcessRanks:
        """Rank 0 of the group, once all workers have joined it."""
        for worker in self._workers:
            Thread(target=self._watch, args=(worker,), daemon=True, name=f"rank {worker.rank}").start()
        self.ranks = ProcessRanks.join(0, self._size, self._store, self._device)
        return self.ranks

    def tell(self, message: bytes) -> None:
        """Sends a command to all workers, which carry out commands in order. Raises ``DeviceLostError``."""
        self.check()
        try:
            for worker in self._workers:
                worker.connection.send_bytes(message)
        except OSError as error:
            raise self._error() from error

    def replies(self) -> Iterator[object]:
        """A reply of each worker. Raises the error that one replies with."""
        for worker in self._workers:
            reply = worker.receive()
            if isinstance(reply, QKVError):
                raise reply
            yield reply

    def check(self) -> None:
        """Raises ``DeviceLostError`` if a worker ended."""
        if self._lost is not None:
            raise self._error()

    def close(self) -> None:
        """Ends all workers and waits for them. May be called again."""
        self._finalizer()

    def _error(self) -> DeviceLostError:
        return DeviceLostError(self._lost or "a rank's process ended", remedy="Make a new engine")

    def _watch(self, worker: Worker) -> None:
        worker.process.wait()
        if self._finalizer.alive:
            self._lost = worker.last_words()
            if self.ranks is not None:
                self.ranks.abort()  # rank 0 may wait for the one that ended


def _end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.end()
