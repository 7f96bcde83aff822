"""Runs the application on a socket until a signal, or ``stop``, ends it; requests under way get to finish."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import uvicorn

from qkv_engine import Engine
from qkv_engine.errors import ConfigError

from .app import make_app
from .connection import LimitedConnection
from .keys import Keys
from .limits import Limits

MAX_PORT = 65_535
SWITCH_SECONDS = 0.0005  # that a thread may keep Python to itself: the engine's waits so long for the event loop's
BACKLOG = 2048  # connections that the kernel accepts before the server does


class Server:
    """An engine on a bound socket. ``run`` blocks; SIGTERM and Ctrl-C drain where it is called in the main thread."""

    def __init__(
        self,
        engine: Engine,
        sock: socket.socket,
        names: Sequence[str],
        *,
        limits: Limits | None = None,
        keys: Keys | None = None,
        allow_origins: Sequence[str] = (),
        allow_hosts: Sequence[str] = (),
        page: bool = True,
    ):
        """Arguments are those of ``make_app``; ``sock`` is closed in the end, ``engine`` is not."""
        limits = Limits() if limits is None else limits
        self._sock = sock
        sites: dict[str, Sequence[str]] = {"allow_origins": allow_origins, "allow_hosts": allow_hosts}
        config = uvicorn.Config(
            make_app(engine, names, limits=limits, keys=keys, page=page, **sites),
            http=cast(Any, partial(LimitedConnection, limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=cast(int, limits.read_timeout),
            timeout_graceful_shutdown=cast(int, limits.drain_timeout),
        )
        self._server = uvicorn.Server(config)
        sock.listen(BACKLOG)  # so that who reads of the server finds it, if with a moment's wait

    @property
    def has_started(self) -> bool:
        """Whether connections are accepted."""
        return self._server.started

    def run(self) -> None:
        """Serves until it is stopped and drained. Raises the signal that stopped it again."""
        self._server.run([self._sock])

    def stop(self) -> None:
        """Begins to drain. For any thread."""
        self._server.should_exit = True


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
