"""The process of a worker: its start, the connection to it, and its end."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import IO

from ..errors import RankLostError

_CODE = "import sys; sys.path[:] = {path!r}; from qkv_engine.parallel.worker import main; main()"
END_SECONDS = 5.0  # for a worker to end by itself
LAST_CHARS = 2000  # of a worker's messages, in the error that says why it ended


class WorkerProcess:
    """A Python process that runs ``worker.py``, with a connection to it.

    It ends when the connection is closed, by us or by our death. It sits in a session of its own, where Ctrl-C does not
    reach it.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does so in ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def send(self, message: bytes) -> None:
        """Sends the worker its next message. Raises ``RankLostError`` if it has ended."""
        with self._alive():
            self.connection.send_bytes(message)

    def receive(self) -> object:
        """The worker's next reply. Raises ``RankLostError`` if there will be none."""
        with self._alive():
            return pickle.loads(self.connection.recv_bytes())

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Makes errors of the connection the end of the process and a ``RankLostError``."""
        try:
            yield
        except (EOFError, OSError) as error:
            self.end()
            raise RankLostError(self.last_words(), remedy="Make a new Engine") from error

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
