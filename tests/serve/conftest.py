"""A server over the demo model, and sockets that may connect to this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from qkv_engine import Engine

from . import chromium
from .running import Running, running


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the server connect to it, and to nothing beyond this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        assert isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1"), address
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="module")
def server(demo_engine: Engine) -> Iterator[Running]:
    with running(demo_engine, names=("demo", "alias")) as found:
        yield found


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used ``server`` no request and no block is left."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_until_idle()


@pytest.fixture(scope="session")
def tab() -> Iterator[chromium.Tab]:
    with chromium.chromium() as found:
        yield found
