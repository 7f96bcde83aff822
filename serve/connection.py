"""One connection under limits: uvicorn's, with time-outs and bounds that it lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .limits import Limits

MAX_HEADER_BYTES = 1 << 16  # of a request line and its headers; more end the connection

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedConnection(HttpToolsProtocol):
    """A connection that is cut off when its client is too slow, in sending headers or in taking an answer.

    uvicorn waits for ever for the first request of a connection, for the rest of its headers, and for a client that
    does not read. Its time-out for kept-alive connections goes on to hold.
    """

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._num_header_bytes = 0  # of the request whose headers are being read
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()  # of the next request, or the rest of a body that nobody read
        super().data_received(data)
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        _cancel(self._header_timer)
        self._header_timer, self._num_header_bytes = None, 0
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.read_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._header_timer)
        _cancel(self._write_timer)
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.read_timeout, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
