"""A job whose process is kept warm: started on first use, ended when it takes too long, and started again."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from .process import Job, ProcessEndedError, SandboxProcess, start_process


class Sandbox:
    """One job and its process. May be asked from several threads, one at a time."""

    def __init__(self, job: Job, setup: Callable[[], bytes]):
        """``setup`` makes the message that a new process gets first."""
        self._job, self._setup = job, setup
        self._lock = threading.RLock()  # a finalizer may ask, or close, in the middle of its thread's exchange
        self._process: SandboxProcess | None = None
        _SANDBOXES.add(self)

    @property
    def is_warm(self) -> bool:
        """Whether a process runs that nobody asks, so that an answer needs no start."""
        return self._process is not None and self._process.is_idle

    def ask(self, request: bytes) -> bytes:
        """The worker's answer. Asks the running process, and a new one if it ends meanwhile; one deadline for both.

        Raises ``Refusal``, the worker's own; ``TimeoutError`` after ``job.seconds``; ``ProcessEndedError`` where the
        work ends its process; ``UnavailableError`` if no process starts.
        """
        with self._lock:
            seconds = self._job.seconds
            if self._process is not None and self._process.is_idle:
                begin = time.monotonic()
                try:
                    return self._process.ask(request, begin + seconds)
                except ProcessEndedError:  # perhaps before the request, and by no fault of its
                    seconds -= time.monotonic() - begin
            self._process = start_process(self._job, self._setup())
            return self._process.ask(request, time.monotonic() + seconds)

    def close(self) -> None:
        """Ends the process, if there is one. Another request starts another."""
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _forget_after_fork(self) -> None:
        self._lock = threading.RLock()  # the parent's may have been held at the fork
        if self._process is not None:
            self._process.leave_to_parent()
            self._process = None


_SANDBOXES: weakref.WeakSet[Sandbox] = weakref.WeakSet()


def _forget_processes() -> None:
    """Gives every job a new process after a fork: a process belongs to the one that started it."""
    for sandbox in list(_SANDBOXES):
        sandbox._forget_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_processes)
