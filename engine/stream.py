"""The hand-over of outputs from the engine's thread to whoever reads them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from .errors import QKVError
from .request import RequestOutput


class OutputStream:
    """Holds the newest output of one request until it is read; one that is not read in time is replaced, never queued.

    So a slow or vanished reader costs the engine nothing. One reader, in a thread or in an event loop; ``delta`` is the
    text that is new to it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0  # readers that sleep until something has changed
        self._pending: RequestOutput | None = None
        self._num_read: list[int] = []  # characters of each completion that were read
        self._error: QKVError | None = None
        self._wake: Callable[[], None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Offers the newest state."""
        with self._lock:
            self._pending = output
            self._notify()

    def fail(self, error: QKVError) -> None:
        """Makes every read raise ``error``, once what was put before has been read."""
        with self._changed:
            self._error = error
            self._notify()

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Waits for a new output; ``None`` after ``timeout`` seconds without one."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(self._readable, timeout)
            finally:
                self._num_waiting -= 1
            return self._take()

    async def get_async(self) -> RequestOutput:
        """Waits for a new output without blocking the running event loop."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while True:
            with self._changed:
                output = self._take()
                if output is not None:
                    return output
                self._wake = lambda: _call_soon(loop, ready.set)
            await ready.wait()
            ready.clear()

    def _readable(self) -> bool:
        return self._pending is not None or self._error is not None

    def _take(self) -> RequestOutput | None:
        output, self._pending = self._pending, None
        if output is None and self._error is not None:
            raise self._error
        if output is not None:
            starts = self._num_read or [0] * len(output.outputs)
            for completion, start in zip(output.outputs, starts, strict=True):
                completion.delta = completion.text[start:]
            self._num_read = [len(completion.text) for completion in output.outputs]
        return output

    def _notify(self) -> None:
        if self._num_waiting:
            self._changed.notify_all()
        if self._wake is not None:
            self._wake()
            self._wake = None


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Wakes a reader in another event loop; a loop that was closed meanwhile has no reader."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
