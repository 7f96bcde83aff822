"""The engine's one owner thread: takes commands from any thread, runs steps while there is work.

Callers' threads take no lock, for the reason given in ``engine/serving/stream.py``: they append to a deque and ring a
bell.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from ..device.cpu.thread_choice import ThreadChoice
from ..errors import DeviceLostError, EngineDeadError, QKVError, RequestError, as_request_error
from .core import EngineCore
from .stream import forked_error
from .submission import Submission

logger = logging.getLogger("qkv_engine")

MAX_RECOVERIES = 3  # recoveries in a row without a good step; the last begins trials, one more failure ends the engine
MAX_RESTARTS = 8  # recoveries of a request without a new token that begin trials, even with good steps in between
MAX_TRIES = 3  # runs of a command that raises; then its caller gets the error
MAX_BATCH = 256  # requests of one command, the default of max_num_seqs: taking them in lasts some 10 ms
COMMAND_SECONDS = 0.01  # of commands between two steps, at least one command; more would delay running requests
CLOSE_SECONDS = 5.0  # for a step that other ranks may hold up; then ``close`` breaks it off
BREAK_SECONDS = 20.0  # for a step that was broken off; then ``close`` leaves the thread to itself
SAVE_SECONDS = 10.0  # for what is cached to reach the KV store when the engine is closed; the rest is lost
HEARTBEAT = 1.0  # seconds after which the idle thread looks for a command whose caller was interrupted before the bell
T = TypeVar("T")


class LoopCommand(NamedTuple):
    """Work for the owner thread; ``give_up`` tells its caller that the work will not be done."""

    run: Callable[[], None]
    give_up: Callable[[QKVError], None]


class EngineLoop:
    """Hands work to the owner thread and never touches the core itself. All methods may be called from any thread."""

    def __init__(self, core: EngineCore, threads: ThreadChoice | None, abandon: Callable[[str], None] | None = None):
        """``threads``: CPU threads that the core's steps compute with; None for steps on a GPU.

        ``abandon``: breaks off a step that other ranks hold up, for the reason given; None without other ranks.
        """
        self._core, self._threads, self._abandon = core, threads, abandon
        self._inbox: deque[LoopCommand] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._names: weakref.WeakValueDictionary[str, Submission] = weakref.WeakValueDictionary()
        self._closing = False
        self._dead: QKVError | None = None
        self._num_tries = 0  # of the first command in the inbox
        self._thread = threading.Thread(target=self._run, name="qkv-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which runs until ``close``."""
        _LOOPS.add(self)
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the owner thread, which may run any object's finalizer, too."""
        return threading.current_thread() is self._thread

    def check_alive(self) -> None:
        """Raises ``EngineDeadError``, with the cause, once nothing can run any more."""
        if self._dead is not None:
            raise self._dead
        if self._closing:
            raise _closed()

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Queues requests; the same step sees the first ``MAX_BATCH`` of them.

        Raises ``RequestError`` for a live id, ``EngineDeadError`` when nothing runs any more; then none is queued.
        """
        names: dict[str, Submission] = {}
        for submission in submissions:
            name = submission.request_id
            holder = names.get(name) or self._names.get(name)
            if holder is not None and not holder.finished:
                raise RequestError("a live request has this id", field="request_id", value=name)
            names[name] = submission
        self._names.update(names)
        for start in range(0, len(submissions), MAX_BATCH):
            self._post_batch(submissions[start : start + MAX_BATCH])

    def _post_batch(self, submissions: Sequence[Submission]) -> None:
        def run() -> None:
            for submission in submissions:
                name = submission.request_id
                self._core.add(submission)
                self._names[name] = self._core.live.get(name, submission)  # of two that came at once, the one that runs

        def give_up(error: QKVError) -> None:
            for submission in submissions:
                submission.stream.fail(error)

        self._post(LoopCommand(run, give_up))

    def abort(self, request_id: str) -> None:
        """Ends a request soon; an id that is not live is ignored, and so is the call when nothing runs any more."""
        if request_id in self._names:
            self._post_if_alive(lambda: self._core.abort(request_id))

    def drop(self, submission: Submission) -> None:
        """``abort`` for the reader of a submission, which may never have been queued; its id is free after that."""

        def run() -> None:
            self._core.drop(submission)
            if self._names.get(submission.request_id) is submission:
                self._names.pop(submission.request_id, None)

        self._post_if_alive(run)

    def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on the owner thread between two steps and returns its result or raises its error."""
        if self.is_own_thread:
            return function()
        reply: SimpleQueue[T | BaseException] = SimpleQueue()

        def run() -> None:
            try:
                reply.put(function())
            except Exception as error:
                reply.put(error)

        self._post(LoopCommand(run, reply.put))
        found = reply.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Stops the thread; requests still live end with ``EngineDeadError``. May be called again."""
        self._closing = True
        self._ring()
        if self._thread.is_alive() and not self.is_own_thread:
            if self._abandon is None:
                self._thread.join()
            else:
                self._join_or(self._abandon)

    def _join_or(self, abandon: Callable[[str], None]) -> None:
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            abandon("the engine was closed in the middle of a step")
            self._thread.join(BREAK_SECONDS)
        if self._thread.is_alive():
            logger.error("a step did not end although its ranks are gone; its memory is not freed")
            _keep_for_ever(self)

    def _post(self, command: LoopCommand) -> None:
        self.check_alive()
        self._inbox.append(command)
        self._ring()
        if self._dead is not None:  # the thread ended meanwhile, perhaps without having seen the command
            command.give_up(self._dead)

    def _post_if_alive(self, run: Callable[[], None]) -> None:
        with suppress(EngineDeadError):
            self._post(LoopCommand(run, lambda error: None))

    def _ring(self) -> None:
        if self._bell.empty():
            self._bell.put(None)

    def _run(self) -> None:
        is_closed = False
        try:
            with nullcontext() if self._threads is None else self._threads.in_force():
                self._serve()
            is_closed, self._dead = True, _closed()
            error = EngineDeadError("the engine was closed while the request ran")
        except BaseException as cause:
            if not self._closing:
                logger.critical("the engine stopped", exc_info=cause)
            self._dead = error = cause if isinstance(cause, EngineDeadError) else _stopped(cause)
        while self._inbox:
            self._inbox.popleft().give_up(error)
        self._core.fail_all(error)
        if isinstance(error, DeviceLostError):
            _keep_for_ever(self)
        else:
            _forget_frames(error)
            ended_well = is_closed and self._core.save_all(SAVE_SECONDS)
            self._core.free()
            if not ended_well:
                gc.collect()  # a step that broke off and its error's frames hold each other, and the model

    def _serve(self) -> None:
        """Runs steps and commands until the engine is closed, and recovers from their errors."""
        failures, is_broken = 0, False
        while self._wait_for_work(is_broken):
            try:
                if is_broken:
                    is_stuck = self._core.count_restarts() >= MAX_RESTARTS
                    in_trials = self._core.recover(isolate=is_stuck or failures == MAX_RECOVERIES)
                    failures, is_broken = 0 if in_trials else failures, False
                self._run_commands()
                if self._core.has_work:
                    self._core.step()
                    self._note_step()
                failures = 0
            except EngineDeadError:
                raise
            except Exception as cause:
                failures, is_broken = failures + 1, True
                # Checked here, so that the traceback and its tensors live on as the context of the error raised.
                self._core.runner.check_device()
                if failures > MAX_RECOVERIES:
                    raise
                logger.error("a step broke off; its requests are recomputed", exc_info=cause)

    def _note_step(self) -> None:
        if self._threads is not None and self._core.last_step is not None:
            self._threads.note(*self._core.last_step)

    def _wait_for_work(self, is_broken: bool) -> bool:
        """Sleeps while there is no command, no work and no step to recover from; ``False`` when closing."""
        while not (is_broken or self._inbox or self._closing or self._core.has_work):
            with suppress(Empty):
                self._bell.get(timeout=HEARTBEAT)
        return not self._closing

    def _run_commands(self) -> None:
        """Runs callers' commands. A command leaves the inbox once done, so that one that breaks off is run again."""
        deadline = time.monotonic() + COMMAND_SECONDS
        for _ in range(len(self._inbox)):
            command = self._inbox[0]
            try:
                command.run()
            except Exception as error:
                self._num_tries += 1
                if self._num_tries < MAX_TRIES:
                    raise
                command.give_up(as_request_error(error))
                logger.error("a command was given up", exc_info=error)
            self._inbox.popleft()
            self._num_tries = 0
            if time.monotonic() > deadline:
                return


def _keep_for_ever(loop: EngineLoop) -> None:
    """Lets nothing that ``loop`` refers to be freed: destructors of a lost device's objects abort the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine is closed", remedy="Make a new Engine")


def _forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and of its causes, whose frames hold the model and the KV memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _stopped(cause: BaseException) -> EngineDeadError:
    return EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")


_LOOPS: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _mark_forked() -> None:
    """Marks every engine dead in a forked child, in which no thread survives and calls would hang."""
    for loop in list(_LOOPS):
        loop._dead = forked_error()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)
