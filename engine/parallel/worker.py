"""The process of a rank above 0: loads its part of the model, then carries out commands until rank 0 is gone."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections import deque
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..config import EngineConfig
from ..device.cache import allocate
from ..device.command import StepCommand
from ..device.host_memory import allocate_host
from ..device.logits import CausalLM, Computed
from ..device.pinned import RowsCopy
from ..errors import QKVError
from ..kv.moves import MoveCommand
from ..loading import enough_memory, load, make_backend, rank_ladder
from .commands import Capture, Command, Setup, decode
from .process import PULSE_BYTES
from .process_ranks import ProcessRanks
from .worker_group import HOST

MOST_UNDER_WAY = 8  # commands whose copies to the host are kept; rank 0 is at most two steps ahead of its tokens


class RankWorker:
    """One rank's memory and backend."""

    def __init__(self, config: EngineConfig, setup: Setup, model: CausalLM, dtype: torch.dtype, device: torch.device):
        ladder = rank_ladder(config.kv, model.config, model.ranks.size, dtype, config.max_model_len)
        memory = allocate(setup.kv_nbytes, device, setup.chunk_nbytes, config.resizable)
        host = allocate_host(setup.host_nbytes, device) if setup.host_nbytes else None
        self._backend = make_backend(model, memory, setup.layout, ladder, config.cuda_graphs, host)
        self._under_way: deque[Computed | list[RowsCopy]] = deque()

    @torch.inference_mode()
    def execute(self, command: Command) -> None:
        """Carries out a command; nobody asks for its results."""
        if isinstance(command, StepCommand):
            self._under_way.append(self._backend.step(command))
        elif isinstance(command, MoveCommand):
            self._under_way.append(self._backend.move(command))
        elif isinstance(command, Capture):
            self._backend.capture(command.limits)
        while len(self._under_way) > MOST_UNDER_WAY:
            _wait(self._under_way.popleft())


def main() -> None:
    """Runs the rank that the process of ``WorkerProcess`` was started for."""
    connection, pulse = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    Thread(target=_answer, args=(pulse,), daemon=True).start()
    commands = _receive(connection)
    config, rank, kind, port = pickle.loads(commands.get())
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    _reply(connection, None)
    store = TCPStore(HOST, port, config.tensor_parallel, is_master=False)
    ranks = ProcessRanks.join(rank, config.tensor_parallel, store, device)
    try:
        with enough_memory():
            loaded, dtype = load(config, device, ranks=ranks)
            _reply(connection, None)
            setup = decode(commands.get())
            assert isinstance(setup, Setup), "the first command"
            torch.set_num_threads(setup.num_threads)
            rank_worker = RankWorker(config, setup, cast(CausalLM, loaded.model), dtype, device)
            _reply(connection, None)
    except QKVError as error:
        _reply(connection, error)
        return
    while True:
        rank_worker.execute(decode(commands.get()))


def _reply(connection: Connection, reply: object) -> None:
    connection.send_bytes(pickle.dumps(reply))


def _answer(pulse: socket.socket) -> None:
    """Tells rank 0, whenever it asks, that the process does not stand still."""
    while found := pulse.recv(PULSE_BYTES):
        pulse.sendall(found)


def _receive(connection: Connection) -> SimpleQueue[bytes]:
    """The messages of rank 0 as they come. Without rank 0 the process ends, whatever it waits for."""
    messages: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    Thread(target=receive, daemon=True).start()
    return messages


def _wait(result: Computed | list[RowsCopy]) -> None:
    """Waits for copies to the host, so that their buffers are used again."""
    if isinstance(result, Computed):
        result.wait()
        return
    for check in result:
        check.wait()
