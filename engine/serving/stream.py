"""The hand-over of outputs from the engine's thread to their reader, without locks.

A lock in a reader's thread would be left taken by a Ctrl-C between its acquisition and its release, and the engine's
thread would wait for it for ever. Everything here is one operation of CPython on an attribute, a deque or a
``SimpleQueue``, each of which happens whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from ..errors import EngineDeadError, QKVError
from ..request import RequestOutput
from .report import Had, Report

Bell = SimpleQueue[None] | asyncio.Future[None]  # of a reader in a thread, or in an event loop


class OutputStream:
    """The newest output of one request, until its reader takes it. An output not read in time is replaced, not queued.

    So a slow or vanished reader costs the engine nothing. One reader, in a thread or in an event loop. The deltas of an
    output begin where the reader's last output ended.
    """

    def __init__(self) -> None:
        self._newest: Report | None = None
        # The last report read, and what its reader has of each completion. One attribute, since a Ctrl-C between two
        # assignments would repeat a delta.
        self._read: tuple[Report | None, list[Had]] = (None, [])
        self._error: QKVError | None = None
        self._bells: deque[Bell] = deque()  # each wakes a reader that found nothing to read
        self._pid = os.getpid()

    def put(self, report: Report) -> None:
        """Offers the newest state. A reader that waits for it sleeps on until ``wake``."""
        self._newest = report

    def fail(self, error: QKVError) -> None:
        """Makes every read raise ``error``, once the newest state has been read."""
        self._error = error
        wake([self])

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Waits for a new output; ``None`` after ``timeout`` seconds without one.

        Raises the error of ``fail``, and ``EngineDeadError`` in a process forked from the engine's.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (output := self._take()) is None:
            bell: SimpleQueue[None] = SimpleQueue()
            self._bells.append(bell)
            if self._is_readable:  # put before the bell was there to be rung
                continue
            self._check_process()
            try:
                bell.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                return self._take()
        return output

    async def get_async(self) -> RequestOutput:
        """Waits for a new output without blocking the running event loop. Raises the errors of ``get``."""
        loop = asyncio.get_running_loop()
        while (output := self._take()) is None:
            ready = loop.create_future()
            self._bells.append(ready)
            if not self._is_readable:
                self._check_process()
                await ready
        return output

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error()

    @property
    def _is_readable(self) -> bool:
        return self._newest is not self._read[0] or self._error is not None

    def _take(self) -> RequestOutput | None:
        report = self._newest
        last_read, had = self._read
        if report is last_read:
            if self._error is not None:
                raise self._error
            return None
        assert report is not None
        output, had = report.read(had)
        self._read = (report, had)
        return output

    def take_bell(self) -> Bell | None:
        """A bell that is to be rung now; each is given out once."""
        try:
            return self._bells.popleft() if self._bells else None
        except IndexError:  # ``fail`` of another thread took it
            return None


def wake(streams: Iterable[OutputStream]) -> None:
    """Wakes the readers of ``streams``. Those of one event loop share a call, each of which costs a thread switch."""
    futures = defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]](list)
    for stream in streams:
        while (bell := stream.take_bell()) is not None:
            if isinstance(bell, SimpleQueue):
                bell.put(None)
            else:
                futures[bell.get_loop()].append(bell)
    for loop, found in futures.items():
        _resolve_soon(loop, found)


def forked_error() -> EngineDeadError:
    """The error of every call in a child process: the engine's thread exists in its parent alone."""
    return EngineDeadError("the process was forked after the engine started", remedy="Make an Engine here")


def _resolve_soon(loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]]) -> None:
    """Wakes the readers in an event loop; one that was closed meanwhile has none."""
    try:
        loop.call_soon_threadsafe(_resolve, futures)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # its reader was not cancelled
            future.set_result(None)
