"""The parent's side of ``template_worker``: starts the process, exchanges messages by a deadline, ends it."""

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
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..errors import ModelError, RequestError

START_SECONDS = 10.0  # for Python and Jinja to start on a busy machine; our own code, so no template can use it up
MAX_FRAME_BYTES = 1 << 26  # of a reply; the longest text allowed takes half of it
FRAME = struct.Struct(">I")  # length of a message in bytes, sent before it
_WORKER = Path(__file__).with_name("template_worker.py")
# Looked up while this module is imported: later an interrupt could leave Python's import lock taken.
_SPECS = [find_spec(name) for name in ("jinja2", "markupsafe")]
_FOLDERS = sorted({str(Path(spec.origin).parent.parent) for spec in _SPECS if spec is not None and spec.origin})


class WorkerEndedError(Exception):
    """The process ended in the middle of an exchange, or before it."""


class TemplateProcess:
    """One worker process with one template. Not thread-safe; it is of no more use after any exception.

    It holds no terminal, pipe or file of ours but one end of a socket, sits in a session of its own, where Ctrl-C does
    not reach it, and ends when the other end of the socket is closed, by us or by our death.
    """

    # PR_SET_PDEATHSIG is left out: it would end the worker with the thread that happened to start it.

    def __init__(self, source: str):
        """Raises ModelError if the process does not start."""
        self.is_idle = True  # not in the middle of an exchange, nor broken by one
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _spawn(theirs)
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise ModelError(f"the process that renders chat templates cannot start: {error}") from error
            raise
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket, os.getpid())
        try:
            deadline = time.monotonic() + START_SECONDS
            self._receive_status(deadline)
            self._send(json.dumps(source).encode(), deadline)
        except (WorkerEndedError, TimeoutError) as error:
            self.close()
            remedy = f"{sys.executable} must be a Python that can import jinja2"
            raise ModelError("the process that renders chat templates does not start", remedy=remedy) from error

    def ask(self, request: bytes, deadline: float) -> str:
        """The text for ``request``, the template's variables as JSON.

        ``deadline`` is in seconds of ``time.monotonic``. Raises RequestError if the template refuses, ModelError if it
        does not compile, TimeoutError after the deadline, and WorkerEndedError. Whatever interrupts the exchange ends
        the process, so that no later one finds half a message.
        """
        self.is_idle = False
        try:
            self._send(request, deadline)
            failure = self._receive_status(deadline)
            text = b"" if failure else self._receive(deadline)
        except BaseException:
            self.close()
            raise
        self.is_idle = True
        if "template_error" in failure:
            raise ModelError(f"the chat template does not compile: {failure['template_error']}")
        if failure:
            raise RequestError(f"the chat template refuses this conversation: {failure.get('error')}")
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError("the chat template writes half a character (a lone surrogate)") from error

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
            raise WorkerEndedError from error

    def _receive_status(self, deadline: float) -> dict[str, Any]:
        """The first message of a reply: empty, or an error."""
        try:
            status = json.loads(self._receive(deadline))
        except ValueError as error:
            raise WorkerEndedError from error
        if not isinstance(status, dict):
            raise WorkerEndedError
        return status

    def _receive(self, deadline: float) -> bytearray:
        (size,) = FRAME.unpack(self._read(FRAME.size, deadline))
        if size > MAX_FRAME_BYTES:
            raise WorkerEndedError
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
                    raise WorkerEndedError from error
                if not received:
                    raise WorkerEndedError
                count += received
        return data

    def leave_to_parent(self) -> None:
        """Drops this process's copy of the socket after a fork; the worker stays the parent's."""
        self._finalizer.detach()
        self._socket.close()


def start_process(source: str) -> TemplateProcess:
    """``TemplateProcess(source)``, made in a thread of its own, where no interrupt finds it half made.

    Raises ModelError.
    """
    made: SimpleQueue[TemplateProcess | Exception] = SimpleQueue()

    def make() -> None:
        try:
            made.put(TemplateProcess(source))
        except Exception as error:
            made.put(error)

    try:
        start_new_thread(make, ())  # a Thread waits for its start under a lock, which an interrupt could leave taken
    except RuntimeError as error:
        raise ModelError(f"the process that renders chat templates cannot start: {error}") from error
    result = made.get()
    if isinstance(result, Exception):
        raise result
    return result


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(_WORKER)]
    nothing = subprocess.DEVNULL
    if sys.platform == "win32":  # a socket is no standard input there: its handle is inherited under its number
        theirs.set_inheritable(True)
        return subprocess.Popen(
            [*command, str(theirs.fileno()), *_FOLDERS],
            stdin=nothing, stdout=nothing, stderr=nothing, close_fds=False,
            creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
        )  # fmt: skip
    return subprocess.Popen(
        [*command, "0", *_FOLDERS], stdin=theirs.fileno(), stdout=nothing, stderr=nothing, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes], ours: socket.socket, pid: int) -> None:
    """Kills the worker: between exchanges it has nothing to lose, and nobody reads the rest of a broken one."""
    ours.close()
    if os.getpid() == pid:
        process.kill()
        process.wait()
