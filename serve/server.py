"""Runs the application on a socket until a signal, or ``stop``, ends it; requests under way get to finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from qkv_engine.errors import ConfigError

from .connection import LimitedConnection
from .limits import Limits

logger = logging.getLogger("qkv_engine")

MAX_PORT = 65_535
SWITCH_SECONDS = 0.0005  # that a thread may keep Python to itself: the engine's waits so long for the event loop's
POLL_SECONDS = 0.05  # between two looks for the end of the last request
BACKLOG = 2048  # connections that the kernel accepts before the server does


class Server:
    """An application on a bound socket. ``run`` blocks; in the main thread SIGTERM and Ctrl-C drain."""

    def __init__(self, app: Starlette, sock: socket.socket, limits: Limits):
        """``app`` is one of ``make_app`` with the same ``limits``; ``sock`` is closed in the end."""
        self._sock = sock
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(LimitedConnection, limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # the application keeps its own
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=cast(int, limits.read_timeout),
            timeout_graceful_shutdown=cast(int, limits.drain_timeout),
        )
        self._server = _Uvicorn(config)
        sock.listen(BACKLOG)  # so that who reads of the server finds it, if with a moment's wait

    @property
    def has_started(self) -> bool:
        """Whether connections are accepted."""
        return self._server.started

    def run(self) -> None:
        """Serves until it is stopped and drained. Raises the signal that stopped it again."""
        try:
            self._server.run([self._sock])
        finally:
            self._server.forget()

    def stop(self) -> None:
        """Begins to drain. For any thread."""
        self._server.should_exit = True


def keep_for_life() -> None:
    """Takes all objects that there are out of garbage collections, which would stop requests to look at them."""
    gc.collect()
    gc.freeze()


class _Uvicorn(uvicorn.Server):
    _serving: Coroutine[Any, Any, None] | None = None

    def serve(self, sockets: list[socket.socket] | None = None) -> Coroutine[Any, Any, None]:
        self._serving = super().serve(sockets)
        return self._serving

    def forget(self) -> None:
        """Ends the coroutine that a signal kept from its start, of which Python would warn."""
        if self._serving is not None:
            self._serving.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cast(Starlette, self.config.app).state.frontend.is_stopping = True
        if number := len(self.server_state.tasks):
            seconds = self.config.timeout_graceful_shutdown
            logger.warning("requests under way: %d, which have %g s to finish; Ctrl-C again ends them", number, seconds)
            await self._finish()
        await super().shutdown(sockets)

    async def _finish(self) -> None:
        """Waits for the requests under way. Others are still accepted, so that they learn that the server stops."""
        end = time.monotonic() + cast(float, self.config.timeout_graceful_shutdown)
        while self.server_state.tasks and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.config.timeout_graceful_shutdown = cast(int, max(0.0, end - time.monotonic()))  # a float will do


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Leaves out the traceback of each request that a server's end breaks off: nothing failed."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def bind(host: str, port: int) -> socket.socket:
    """A socket on ``host`` and ``port``, 0 for any free one. Raises ``ConfigError``."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError("no port", field="port", value=port, remedy=f"Give 0 to {MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"not an address: {error}", field="host", value=host) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        message = f"cannot be used: {error.strerror}"
        raise ConfigError(message, field="port", value=port, remedy="Give another one, or 0 for any") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The address of a bound socket, for people."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
