"""The store's own thread: writes what callers leave in a bounded queue, in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import NamedTuple

logger = logging.getLogger("qkv_engine")


class WriterJob(NamedTuple):
    """Work for the thread, which holds ``nbytes`` of memory of somebody until it is done."""

    nbytes: int
    run: Callable[[], None]


class WriterThread:
    """Runs jobs one after the other. All methods may be called from any thread."""

    def __init__(self, max_nbytes: int):
        """``max_nbytes``: the most that waiting jobs may hold; one job alone may hold more."""
        self._max_nbytes = max_nbytes
        self._jobs: deque[WriterJob] = deque()
        self._changed = Condition()
        self._closing = False
        self._nbytes = 0
        self._thread = Thread(target=self._run, name="qkv-kv-store", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes that waiting jobs hold."""
        return self._nbytes

    def has_room(self, nbytes: int) -> bool:
        """Whether a job that holds so many bytes has room in the queue."""
        return self._nbytes == 0 or self._nbytes + nbytes <= self._max_nbytes

    def put(self, job: WriterJob) -> bool:
        """Takes a job, or returns ``False`` where the queue is closed, or full for one that holds memory."""
        with self._changed:
            is_full = job.nbytes > 0 and not self.has_room(job.nbytes)
            if self._closing or is_full:
                return False
            self._jobs.append(job)
            self._nbytes += job.nbytes
            self._changed.notify_all()
        return True

    def drain(self, timeout: float) -> bool:
        """Waits until all jobs are done, at most ``timeout`` seconds; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self, timeout: float) -> bool:
        """Takes no more jobs and waits for the end of those that wait; returns whether the thread ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                job.run()
            except Exception:
                logger.exception("KV store: a job failed")
            with self._changed:
                self._jobs.popleft()
                self._nbytes -= job.nbytes
                self._changed.notify_all()
