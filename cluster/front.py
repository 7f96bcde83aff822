"""The front: an ASGI application without an engine that forwards requests to replicas, and again if one dies."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any
from uuid import uuid4

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from qkv_engine.serve.app import METRICS_TYPE
from qkv_engine.serve.bodies import read_bytes
from qkv_engine.serve.errors import ApiError, ClientGoneError, as_api_error, error_response, last_events
from qkv_engine.serve.fair_threads import FairThreads, Load
from qkv_engine.serve.frontend import FIRST_TOKEN
from qkv_engine.serve.keys import authorization_of
from qkv_engine.serve.limits import Limits

from .metrics import merged
from .routing import routing_key

logger = logging.getLogger("ray.serve")  # which Ray writes to a file of this process

ATTEMPTS = 2  # replicas that a request is sent to, as long as nothing of its answer has come
MAX_DEATHS = 2  # replicas that may be lost with equal bodies before a token; then such a body is refused
REMEMBERED = 4096  # bodies with which a replica was lost
RETRY_AFTER = "1"  # seconds after which a refused client may try again
SESSION = "x-session-id"  # header by which a client names its routing key
_REQUEST_ID = b"x-request-id"  # header to which Ray's proxy gives an id of its own
_FORWARDED = ("method", "path", "raw_path", "query_string", "headers", "http_version")  # of an ASGI scope


class Front:
    """Forwards each request whole, to the replica that its routing key names while that one has room.

    The head of an answer is held back until its first chunk. A whole answer whose replica dies while its tokens are
    made is made again by another one, and the client sees none of it; a stream that has begun ends with an error as its
    last event. A request with which a replica dies before a token may be what killed it: the front never sends it
    again, and refuses its client's next attempts once they have cost ``MAX_DEATHS`` replicas.
    """

    def __init__(self, replicas: DeploymentHandle, limits: Limits):
        self._replicas, self._limits = replicas, limits
        self._live: set[asyncio.Timeout] = set()  # the time limits of requests under way
        self._is_draining = False
        self._deaths = Deaths()
        self._threads = FairThreads()

    def __serve_build_asgi_app__(self) -> Any:
        """The application, as Ray Serve asks for it."""
        return Starlette(routes=[Mount("/", self._serve)])  # which answers the messages of its lifespan

    async def drain(self, seconds: float) -> int:
        """The number of requests under way. Further ones are refused, and these end in an error after ``seconds``."""
        self._is_draining = True
        end = asyncio.get_running_loop().time() + seconds
        for limit in self._live:
            with suppress(RuntimeError):  # where it is over, and its request only has its error to send
                limit.reschedule(min(end, limit.when() or end))
        return len(self._live)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer, limit = _Forwarded(send), asyncio.timeout(self._limits.request_timeout)
        self._live.add(limit)
        try:
            async with limit:
                if self._is_draining:
                    raise _shutting_down()
                body = await read_bytes(Request(scope, receive), self._limits)
                forwarded = {name: scope[name] for name in _FORWARDED if name in scope}
                if scope["path"] == "/metrics":
                    await self._collect_metrics(forwarded, answer)
                else:
                    await self._forward(forwarded, body, answer)
        except ClientGoneError:
            return
        except Exception as error:
            is_cut = self._is_draining and isinstance(error, TimeoutError)
            await answer.fail(_shutting_down() if is_cut else _refusal(error), scope, receive)
        finally:
            self._live.remove(limit)

    async def _forward(self, scope: dict[str, Any], body: bytes, answer: _Forwarded) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        authorization = authorization_of(headers) or ""
        look = partial(_look_at, scope, authorization)
        digest, key = await self._threads.read(Load(authorization, len(body)), body, look)
        self._deaths.check(digest)
        for attempt in range(1, ATTEMPTS + 1):
            answer.head, answer.has_token = None, False
            call = self._replicas.options(stream=True, session_id=headers.get(SESSION) or key).answer.remote(
                scope, body
            )
            try:
                async for messages in call:
                    for message in messages:
                        await answer(message)
                self._deaths.forget(digest)
                return
            except RayActorError:
                logger.warning("a replica was lost in attempt %d of a request", attempt)
                if not answer.has_token:
                    self._deaths.note(digest)
                if answer.has_begun or not answer.has_token or attempt == ATTEMPTS:
                    raise
            finally:
                call.cancel()

    async def _collect_metrics(self, scope: dict[str, Any], answer: _Forwarded) -> None:
        """The metrics of all replicas, or the refusal of one of them."""
        pages: dict[str, str] = {}
        for replica, messages in await self._replicas.broadcast("answer_whole", scope).results_async():
            if messages[0]["status"] != 200:
                for message in messages:
                    await answer(message)
                return
            pages[replica] = b"".join(message.get("body", b"") for message in messages).decode()
        await Response(merged(pages), headers={"content-type": METRICS_TYPE})({"type": "http"}, _nothing, answer)


class Deaths:
    """How many replicas were lost with each body before a token of its answer, by digest."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}  # the oldest first

    def check(self, digest: bytes) -> None:
        """Raises ``ApiError`` for a body with which ``MAX_DEATHS`` replicas were lost."""
        if self._numbers.get(digest, 0) >= MAX_DEATHS:
            message = f"{MAX_DEATHS} replicas were lost with this request; it is not sent to another one"
            raise ApiError(400, message, code="replica_lost")

    def note(self, digest: bytes) -> None:
        """Counts a replica that was lost."""
        self._numbers[digest] = self._numbers.pop(digest, 0) + 1
        if len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]

    def forget(self, digest: bytes) -> None:
        """A replica answered and lives."""
        self._numbers.pop(digest, None)


class _Forwarded:
    """An answer on its way to a client."""

    def __init__(self, send: Send):
        self.head: Message | None = None  # of the answer, not sent yet
        self.has_begun = False
        self.has_token = False  # by the replica that was asked last
        self._is_stream = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Sends a message on, a head with the first body."""
        if message["type"] == FIRST_TOKEN:
            self.has_token = True
            return
        if message["type"] == "http.response.start":
            headers = [header for header in message["headers"] if header[0] != _REQUEST_ID]
            self.head = {**message, "headers": headers}
            return
        if self.head is not None:
            head, self.head, self.has_begun, self.has_token = self.head, None, True, True
            self._is_stream = dict(head["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            await self._send(head)
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Ends the answer with an error: a response, or the last event of a stream that has begun."""
        if not self.has_begun:
            await error_response(error, scope)(scope, receive, self._send)
        elif self._is_stream:
            await self._send({"type": "http.response.body", "body": last_events(error, scope), "more_body": False})
        else:
            raise error  # the connection breaks off, and nobody takes the part for the whole


def _look_at(scope: Scope, authorization: str, body: bytes) -> tuple[bytes, str]:
    """A digest of a request, whoever sends it, and its routing key."""
    digest = sha256(scope["path"].encode() + b"\0")
    digest.update(body)
    return digest.digest(), routing_key(body, authorization)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _shutting_down() -> ApiError:
    headers = {"retry-after": RETRY_AFTER}
    return ApiError(503, "the server shuts down; send the request again", code="shutting_down", headers=headers)


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        headers = {"retry-after": RETRY_AFTER}
        return ApiError(429, "every replica is full", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, RayActorError):
        return ApiError(503, "the replica of this request was lost; send it again", code="replica_lost")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request did not end in time", code="timeout")
    return as_api_error(error, uuid4().hex)
