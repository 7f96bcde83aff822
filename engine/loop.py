"""The engine's one owner thread: takes submissions and aborts from any thread, runs steps while there is work."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from .core import EngineCore
from .errors import EngineDeadError, QKVError, RequestError
from .submission import Submission

logger = logging.getLogger("qkv_engine")

MAX_RECOVERIES = 3  # in a row, without a step in between that went well
T = TypeVar("T")


class EngineLoop:
    """Hands work to the owner thread and never touches the core itself. All methods may be called from any thread."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._dead: QKVError | None = None
        self._thread = threading.Thread(target=self._run, name="qkv-engine", daemon=True)
        _LOOPS.add(self)
        self._thread.start()

    def submit(self, *submissions: Submission) -> None:
        """Queues requests that the same step is to see.

        Raises ``RequestError`` for a live id, ``EngineDeadError`` when nothing runs any more; then none is queued.
        """
        with self._changed:
            self._check_alive()
            for submission in submissions:
                if submission.request_id in self._core.live:
                    raise RequestError("a live request has this id", field="request_id", value=submission.request_id)
            self._core.live.update({submission.request_id: submission for submission in submissions})
            self._post(lambda: self._add_all(submissions))

    def abort(self, request_id: str) -> None:
        """Ends a request soon; an id that is not live is ignored."""
        with self._changed:
            if self._dead is None and not self._closing:
                self._post(lambda: self._core.abort(request_id))

    def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on the owner thread between two steps and returns its result."""
        done: Future[T] = Future()

        def run() -> None:
            if done.done():
                return
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        with self._changed:
            self._check_alive()
            self._post(run)
        while True:
            try:
                return done.result(timeout=1.0)
            except FutureTimeoutError:
                with self._changed:
                    self._check_alive()

    def close(self) -> None:
        """Stops the thread; requests still live end with ``EngineDeadError``. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _add_all(self, submissions: tuple[Submission, ...]) -> None:
        for submission in submissions:
            self._core.add(submission)

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._closing:
            raise EngineDeadError("the engine is closed", remedy="Make a new Engine")

    def _run(self) -> None:
        try:
            failures = 0
            while self._wait_for_work():
                try:
                    self._run_commands()
                    if self._core.has_work:
                        self._core.step()
                    failures = 0
                except Exception as cause:
                    failures += 1
                    if failures > MAX_RECOVERIES:
                        raise
                    logger.error("a step broke off; its requests are recomputed", exc_info=cause)
                    self._core.recover()
            error: QKVError = EngineDeadError("the engine was closed while the request ran")
        except BaseException as cause:
            logger.critical("the engine stopped", exc_info=cause)
            error = EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")
        with self._changed:
            self._dead = error
            self._core.fail_all(error)
            self._core.free()

    def _wait_for_work(self) -> bool:
        """Sleeps while nothing is posted and nothing runs; ``False`` when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._closing or self._core.has_work)
            return not self._closing

    def _run_commands(self) -> None:
        """Does what callers posted. A command is taken out once done: one that breaks off is done again."""
        for _ in range(len(self._inbox)):
            self._inbox[0]()
            self._inbox.popleft()


_LOOPS: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _mark_forked() -> None:
    """Threads do not survive a fork: in the child every engine says so instead of hanging."""
    for loop in list(_LOOPS):
        loop._changed = threading.Condition()  # the parent's lock may have been held at the fork
        loop._dead = EngineDeadError("the process was forked after the engine started", remedy="Make an Engine here")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)
