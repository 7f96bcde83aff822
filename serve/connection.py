"""One connection under limits: uvicorn's, with time-outs and bounds that it lacks."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .limits import Limits

MAX_HEADER_BYTES = 1 << 16  # of a request line and its headers, or around a body's parts; more end the connection


class LimitedConnection(HttpToolsProtocol):
    """A connection that is cut off when its client is too slow, in sending headers or in taking an answer.

    uvicorn waits for ever for the first request of a connection, for the rest of its headers, and for a client that
    does not read. Its time-out for kept-alive connections goes on to hold.
    """

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._limits = limits
        self._num_header_bytes = 0  # since the last headers, or part of a body, that were complete
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _QuietTransport(transport)))
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()  # of the next request, or the rest of a body that nobody read
        self._num_header_bytes += len(data)
        super().data_received(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._num_header_bytes = 0
        if self._is_offer():
            return
        _cancel(self._header_timer)
        self._header_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_offer():
            super().on_message_complete()

    def head_without_offer(self) -> bytes:
        """The request line and the headers once more, without ``Upgrade``."""
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return line + b"".join(b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade") + b"\r\n"

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.read_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()  # nobody is left for their answers, each of which would end in a traceback
        _cancel(self._header_timer)
        _cancel(self._write_timer)
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.read_timeout, self.transport.abort)

    def _is_offer(self) -> bool:
        """Whether the request that is being read offers to go on in another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an error unless an answer is under way."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = ApiError(status, message).body()
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write((line + headers).encode() + body)
        self.transport.close()


class _QuietTransport:
    """A transport that drops what is written after its end, as asyncio's does; uvloop's raises, in every request."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends ``data``, unless the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(data)


class _Parser(HttpRequestParser):
    """A parser that declines other protocols: Java's client and ``curl --http2`` offer HTTP/2 in their first request.

    httptools takes the bytes after such an offer for the other protocol's, though they are the request's body.
    """

    def __init__(self, connection: LimitedConnection):
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._connection = connection

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except HttpParserUpgrade as offer:
            data = self._connection.head_without_offer() + data[offer.args[0] :]
            self._connection.parser = parser = _Parser(self._connection)  # this one may take no more requests
            parser.feed_data(data)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
