"""A replica: an engine behind the HTTP application, called through Ray in place of a socket."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from anyio import to_thread
from ray import serve
from starlette.types import Message

from qkv_engine import Engine
from qkv_engine.config import EngineConfig
from qkv_engine.errors import EngineDeadError
from qkv_engine.serve.app import make_app
from qkv_engine.serve.frontend import FIRST_TOKEN
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.limits import Limits
from qkv_engine.serve.server import SWITCH_SECONDS, keep_for_life

logger = logging.getLogger("ray.serve")  # which Ray writes to a file of this process

MESSAGES_PER_SECOND = 2000  # of a replica; one front's core forwards about as many. More wait and travel together


class Replica:
    """One engine in a process of its own, with the GPUs that Ray gave to the process.

    The process ends with its engine. Ray then starts another one, and the front sends requests elsewhere.
    """

    def __init__(
        self, options: Mapping[str, Any], names: Sequence[str], limits: Limits, keys: Keys, sites: Mapping[str, Any]
    ):
        """``options`` are those of ``Engine``; the others are those of ``make_app``."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._engine = Engine(**options)
        own = replace(limits, response_memory=0)  # the next request of a conversation may reach another replica
        self._app = make_app(self._engine, names, limits=own, keys=keys, **sites)
        keep_for_life()
        self._num_live = 0  # answers under way
        self._seats: int = options.get("max_num_seqs", EngineConfig.max_num_seqs)

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """The application's ASGI messages for a request, the bodies that came together as one.

        One of type ``FIRST_TOKEN`` says of an answer that comes whole that its first token is there. Between two lists
        is a pause that grows with the answers under way. Cancelling the call is the client's disconnect.
        """
        exchange = _Exchange(body)
        self._num_live += 1
        whole = {"type": "http", **scope, "extensions": {FIRST_TOKEN: exchange.note_token}}
        running = asyncio.ensure_future(self._app(whole, exchange.receive, exchange.send))
        running.add_done_callback(lambda _: exchange.finish())
        try:
            async for messages in exchange.batches():
                self.check_health()  # an answer that the engine's end spoilt is not sent
                yield _joined(messages)
                await exchange.pause(self._num_live / MESSAGES_PER_SECOND)
            await running
        finally:
            self._num_live -= 1
            exchange.disconnect()
            await asyncio.gather(running, return_exceptions=True)

    async def answer_whole(self, scope: Mapping[str, Any]) -> tuple[str, list[Message]]:
        """The replica's name, and all messages for a request without a body."""
        messages = [message async for batch in self.answer(scope, b"") for message in batch]
        return serve.get_replica_context().replica_id.unique_id, messages

    def check_health(self) -> None:
        """Ends the process if the engine has stopped."""
        try:
            self._engine.describe()
        except EngineDeadError:
            logger.exception("the engine has stopped, and its replica ends")
            os._exit(1)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for ``wanted_replicas``: ``load`` is the share of the batch or of KV memory in use, the larger one.

        It is above 1 where requests wait. ``seats`` are the requests that run at once.
        """
        stats = await to_thread.run_sync(self._engine.stats)
        batch = (stats.num_running + stats.num_waiting) / self._seats
        return {"load": max(batch, stats.kv_share), "seats": float(self._seats)}


class _Exchange:
    """The two ends of an ASGI call: a whole body in, messages out."""

    def __init__(self, body: bytes):
        self._body: bytes | None = body
        self._left, self._ended = asyncio.Event(), asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()  # None is the last

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._messages.put_nowait(message)

    def note_token(self) -> None:
        """Says that the answer has a token."""
        self._messages.put_nowait({"type": FIRST_TOKEN})

    async def batches(self) -> AsyncIterator[list[Message]]:
        """All messages that have come since the batch before, at least one."""
        is_open = True
        while is_open:
            found = [await self._messages.get()]
            while not self._messages.empty():
                found.append(self._messages.get_nowait())
            is_open = found[-1] is not None
            if messages := [message for message in found if message is not None]:
                yield messages

    def finish(self) -> None:
        """Ends the batches."""
        self._messages.put_nowait(None)
        self._ended.set()

    async def pause(self, seconds: float) -> None:
        """Waits, but not beyond the end of the answer."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    def disconnect(self) -> None:
        """Tells the application that nobody reads."""
        self._left.set()


def _joined(messages: list[Message]) -> list[Message]:
    """Messages of one answer, their bodies in one."""
    heads = [message for message in messages if message["type"] == "http.response.start"]
    bodies = [message for message in messages if message["type"] == "http.response.body"]
    if len(bodies) < 2:
        return messages
    body = b"".join(message.get("body", b"") for message in bodies)
    return [*heads, {**bodies[-1], "body": body}]
