"""The process of a worker: its start, the connection to it, and its end."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import IO

from ..errors import RankLostError

_CODE = "import sys; sys.path[:] = {path!r}; from qkv_engine.parallel.worker import main; main()"
END_SECONDS = 5.0  # for a worker to end by itself
PULSE_BYTES = 4096  # of answers that are read at once
LAST_CHARS = 2000  # of a worker's messages, in the error that says why it ended


class WorkerProcess:
    """A Python process that runs ``worker.py``, with a connection to it and a pulse.

    It ends when the connection is closed, by us or by our death. It sits in a session of its own, where Ctrl-C does not
    reach it. The pulse sends back each byte that it gets, however long a command takes.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        self._pulse, their_pulse = socket.socketpair()
        with theirs, their_pulse:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=sys.path), str(theirs.fileno()), str(their_pulse.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
                pass_fds=[theirs.fileno(), their_pulse.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does so in ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def ask(self) -> None:
        """Sends the pulse a byte."""
        self._pulse.setblocking(False)
        with suppress(OSError):  # full, or ended
            self._pulse.send(b"?")

    def listen(self, seconds: float) -> bool | None:
        """Waits for ``seconds``; whether the pulse answered meanwhile, ``None`` as soon as the process has ended."""
        deadline, has_answered = time.monotonic() + seconds, False
        while (left := deadline - time.monotonic()) > 0:
            self._pulse.settimeout(left)
            try:
                found = self._pulse.recv(PULSE_BYTES)
            except TimeoutError:
                break
            except OSError:
                found = b""
            if not found:
                self.process.wait()
                return None
            has_answered = True
        return has_answered if self.process.poll() is None else None

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
            raise RankLostError(self.exit_message(), remedy="Make a new Engine") from error

    def exit_message(self) -> str:
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
            self.kill()

    def kill(self) -> None:
        """Ends the process, even one that stands still, and waits for it, if not for one that the system keeps."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
