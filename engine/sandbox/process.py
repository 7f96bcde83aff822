"""The parent's side of a sandbox's process: starts it, exchanges messages by a deadline, ends it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
import weakref
from _thread import start_new_thread
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..errors import UnavailableError

MAX_FRAME_BYTES = 1 << 26  # of a reply; the longest text allowed takes half of it
FRAME = struct.Struct(">I")  # length of a message in bytes, sent before it
_PROGRAM = Path(__file__).with_name("program.py")


@dataclass(frozen=True)
class Job:
    """What a sandbox does, and its limits.

    Fields
        work: what its process does, to end the words "the process that".
        source: the worker's source, beside nothing but the standard library and what is in ``folders``.
        folders: folders for Python's path.
        seconds: of the clock for one request.
        start_seconds: for Python to start and the worker to be made, on a busy machine.
        memory: bytes beyond those that the worker takes once it is made.
    """

    work: str
    source: Path
    folders: Sequence[str]
    seconds: float
    start_seconds: float
    memory: int


class ProcessEndedError(Exception):
    """The process ended in the middle of an exchange, or before it."""


class Refusal(Exception):
    """The worker's own error. ``is_broken``: its setup is at fault, and it will refuse all requests."""

    def __init__(self, text: str, is_broken: bool):
        super().__init__(text)
        self.is_broken = is_broken


def folders_of(*packages: str) -> list[str]:
    """The folders in which those of ``packages`` lie that are installed.

    To be called while a module is imported: later an interrupt could leave Python's import lock taken.
    """
    specs = [find_spec(name) for name in packages]
    return sorted({str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin})


class SandboxProcess:
    """One process with one worker. Not thread-safe; it is of no more use after any exception but ``Refusal``.

    It holds no terminal, pipe or file of ours but one end of a socket, sits in a session of its own, where Ctrl-C does
    not reach it, and ends when the other end of the socket is closed, by us or by our death.
    """

    # PR_SET_PDEATHSIG is left out: it would end the worker with the thread that happened to start it.

    def __init__(self, job: Job, setup: bytes):
        """Raises UnavailableError if the process does not start."""
        self.is_idle = True  # not in the middle of an exchange, nor broken by one
        try:
            self._socket, self._process = _started(job)
        except OSError as error:
            raise _no_start(job, f"cannot start: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket, os.getpid())
        try:
            deadline = time.monotonic() + job.start_seconds
            self._send(setup, deadline)
            self._receive_status(deadline)
        except (ProcessEndedError, TimeoutError) as error:
            self.close()
            raise _no_start(job, "does not start") from error

    def ask(self, request: bytes, deadline: float) -> bytes:
        """The worker's answer.

        ``deadline`` is in seconds of ``time.monotonic``. Raises Refusal, TimeoutError after the deadline, and
        ProcessEndedError. Whatever interrupts the exchange ends the process, so that no later one finds half a message.
        """
        self.is_idle = False
        try:
            self._send(request, deadline)
            failure = self._receive_status(deadline)
            answer = b"" if failure else bytes(self._receive(deadline))
        except BaseException:
            self.close()
            raise
        self.is_idle = True
        if failure:
            raise Refusal(str(failure.get("error")), bool(failure.get("is_broken")))
        return answer

    def close(self) -> None:
        """Ends the process and waits for it. May be called again."""
        self._finalizer()

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(FRAME.pack(len(data)) + data)
        except TimeoutError:
            raise
        except OSError as error:
            raise ProcessEndedError from error

    def _receive_status(self, deadline: float) -> dict[str, Any]:
        """The first message of a reply: empty, or an error."""
        try:
            status = json.loads(self._receive(deadline))
        except ValueError as error:
            raise ProcessEndedError from error
        if not isinstance(status, dict):
            raise ProcessEndedError
        return status

    def _receive(self, deadline: float) -> bytearray:
        (size,) = FRAME.unpack(self._read(FRAME.size, deadline))
        if size > MAX_FRAME_BYTES:
            raise ProcessEndedError
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytearray:
        data, count = bytearray(size), 0
        with memoryview(data) as buffer:
            while count < size:
                try:
                    self._socket.settimeout(_left(deadline))
                    received = self._socket.recv_into(buffer[count:])
                except TimeoutError:
                    raise
                except OSError as error:
                    raise ProcessEndedError from error
                if not received:
                    raise ProcessEndedError
                count += received
        return data

    def leave_to_parent(self) -> None:
        """Drops this process's copy of the socket after a fork; the worker stays the parent's."""
        self._finalizer.detach()
        self._socket.close()


def start_process(job: Job, setup: bytes) -> SandboxProcess:
    """``SandboxProcess(job, setup)``, made in a thread of its own, where no interrupt finds it half made.

    Raises UnavailableError.
    """
    made: SimpleQueue[SandboxProcess | Exception] = SimpleQueue()

    def make() -> None:
        try:
            made.put(SandboxProcess(job, setup))
        except Exception as error:
            made.put(error)

    try:
        start_new_thread(make, ())  # a Thread waits for its start under a lock, which an interrupt could leave taken
    except RuntimeError as error:
        raise _no_start(job, f"cannot start: {error}") from error
    result = made.get()
    if isinstance(result, Exception):
        raise result
    return result


def _no_start(job: Job, what: str) -> UnavailableError:
    remedy = f"{sys.executable} must be a Python that can run {job.source.name}"
    return UnavailableError(f"the process that {job.work} {what}", remedy=remedy)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _started(job: Job) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Our end of the socket to a new process, and the process. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return ours, _spawn(theirs, job)
    except BaseException:
        ours.close()
        raise


def _spawn(theirs: socket.socket, job: Job) -> subprocess.Popen[bytes]:
    command, options = [sys.executable, "-I", "-S", str(_PROGRAM)], [str(job.source), str(job.memory), *job.folders]
    nothing = subprocess.DEVNULL
    if sys.platform == "win32":  # a socket is no standard input there: its handle is inherited under its number
        theirs.set_inheritable(True)
        return subprocess.Popen(
            [*command, str(theirs.fileno()), *options],
            stdin=nothing, stdout=nothing, stderr=nothing, close_fds=False,
            creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
        )  # fmt: skip
    return subprocess.Popen(
        [*command, "0", *options], stdin=theirs.fileno(), stdout=nothing, stderr=nothing, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes], ours: socket.socket, pid: int) -> None:
    """Kills the worker: between exchanges it has nothing to lose, and nobody reads the rest of a broken one."""
    ours.close()
    if os.getpid() == pid:
        process.kill()
        process.wait()
