"""A server of a test: uvicorn on a loopback socket in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import openai

from qkv_engine import Engine
from qkv_engine.serve.app import make_app
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.limits import Limits
from qkv_engine.serve.server import Server, bind, url_of

HELLO = [{"role": "user", "content": "What is 4000+42?"}]
# Runs until it is stopped: the demo model repeats itself.
ENDLESS = {"model": "demo", "prompt": "Hello", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
ENDLESS_BODY = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}


class Running:
    """A server that accepts connections, and clients of it."""

    def __init__(self, engine: Engine, server: Server, url: str):
        self.engine, self.server, self.url = engine, server, url
        self.http = httpx.Client(base_url=url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="not needed", max_retries=0, timeout=30)

    @property
    def frontend(self):
        return self.server._server.config.app.state.frontend

    def raw(self, data: bytes = b"") -> socket.socket:
        """A connection on which ``data`` was sent."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.sendall(data)
        return connection

    def post(self, body: object, path: str = "/v1/completions") -> httpx.Response:
        return self.http.post(path, json=body)

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Waits until no request is left; checks that every byte came back and that the books are whole."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if not (stats.num_running or stats.num_waiting or self.frontend.seats.num_taken):
                break
            time.sleep(0.01)
        assert (stats.num_running, stats.num_waiting, stats.kv_bytes_used, self.frontend.seats.num_taken) == (
            0,
            0,
            0,
            0,
        )
        tables = self.engine._started.core.space.tables
        self.engine._loop.call(tables.check_integrity)


@contextmanager
def running(
    engine: Engine,
    *,
    names: Sequence[str] = ("demo",),
    limits: Limits | None = None,
    keys: Keys | None = None,
    allow_origins: Sequence[str] = (),
    allow_hosts: Sequence[str] = (),
    page: bool = True,
    examples: Sequence[str] = (),
    send_buffer: int | None = None,
    admin_key: str | None = None,
) -> Iterator[Running]:
    """A server over ``engine`` for the block, stopped and drained in the end."""
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:  # of the kernel, for every connection
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sites = {"allow_origins": allow_origins, "allow_hosts": allow_hosts}
    limits = Limits() if limits is None else limits
    options = {"page": page, "examples": examples, "admin_key": admin_key}
    app = make_app(engine, names, limits=limits, keys=keys, **options, **sites)
    server = Server(app, sock, limits)
    url = url_of(sock)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.has_started:
        time.sleep(0.005)
    found = Running(engine, server, url)
    try:
        yield found
    finally:
        found.http.close()
        found.openai.close()
        server.stop()
        thread.join(timeout=30)
        assert not thread.is_alive()
