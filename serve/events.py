"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv_engine import RequestOutput

from .answers import Answer
from .bodies import JsonObject
from .errors import ClientGoneError, as_api_error, ended
from .frontend import Generation

KEEP_ALIVE = 15.0  # seconds of silence after which a comment tells proxies that the connection lives
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream(Response):
    """A response of chunks, one for each new part of a completion, closed by ``[DONE]``.

    The next chunk is made when the client has taken the one before: what came meanwhile goes into it.
    """

    def __init__(
        self, generation: Generation, answer: Answer, request_id: str, names: Mapping[str, str], *, with_usage: bool
    ):
        """``names`` are fields of the body by the engine's name for them."""
        self.status_code, self.background = 200, None
        self._generation, self._answer, self._with_usage = generation, answer, with_usage
        self._request_id, self._names = request_id, names
        self._begun: set[int] = set()  # prompts with an output
        self._finished: set[tuple[int, int]] = set()  # prompts and completions whose end was sent
        self._is_silent = True  # since the last look of ``_keep_alive``

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._follow(receive)
        except ClientGoneError:
            return
        finally:
            self._generation.close()
        await self._event(b"[DONE]", more_body=False)

    async def _follow(self, receive: Receive) -> None:
        """Sends all chunks; an error is the last one."""
        keeping_alive = asyncio.ensure_future(self._keep_alive())
        try:
            await self._generation.follow(receive, self._send_new)
            if self._with_usage:
                outputs = [output for output in self._generation.outputs if output is not None]
                await self._chunk([], self._answer.usage(outputs, sum(self._generation.num_tokens)))
        except ClientGoneError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # cancelled at the end of the drain timeout
            await self._event(as_api_error(error, self._request_id).body())
        finally:
            keeping_alive.cancel()

    async def _send_new(self, number: int, output: RequestOutput) -> None:
        """Sends what is new in an output of prompt ``number``."""
        if number not in self._begun:
            self._begun.add(number)
            for choice in self._answer.opening(number, output):
                await self._chunk([choice])
        if output.error is not None:
            raise ended(output, self._request_id, self._names)
        for completion in output.outputs:
            if (number, completion.index) in self._finished:
                continue
            if completion.finished:
                self._finished.add((number, completion.index))
            part = self._answer.part(number, completion)
            if part is not None:
                await self._chunk([part])

    async def _chunk(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> None:
        chunk = self._answer.chunk(choices)
        if self._with_usage:
            chunk["usage"] = usage
        await self._event(msgspec.json.encode(chunk))

    async def _event(self, data: bytes, *, more_body: bool = True) -> None:
        self._is_silent = False
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % data, "more_body": more_body})

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE)
            if self._is_silent:
                await self._send({"type": "http.response.body", "body": b": wait\n\n", "more_body": True})
            self._is_silent = True
