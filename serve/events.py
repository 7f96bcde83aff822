"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv_engine import CompletionOutput, RequestOutput

from .answers import Answer
from .bodies import JsonObject
from .errors import ApiError, ClientGoneError, as_api_error, ended
from .frontend import Generation

KEEP_ALIVE = 15.0  # seconds of silence after which an event tells proxies and clients that the connection lives
COMMENT = b": wait\n\n"  # an event that every client ignores
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Writer(Protocol):
    """The events of one answer in a dialect, as bytes of the stream. ``number`` is that of a prompt, from 0."""

    closing: bytes  # after the last event, also after an error

    def opening(self, number: int, output: RequestOutput) -> Iterable[bytes]:
        """What a prompt's events begin with."""
        ...

    def part(self, number: int, delta: CompletionOutput) -> Iterable[bytes]:
        """What is new in a completion."""
        ...

    def ending(self, outputs: Sequence[RequestOutput], num_output: int) -> Iterable[bytes]:
        """The end of the answer, for which ``num_output`` tokens were sampled."""
        ...

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """The end of an answer that broke off."""
        ...

    def pause(self) -> bytes:
        """What is sent in a long silence."""
        ...


class ChunkWriter:
    """Chunks of ``/v1/chat/completions`` and ``/v1/completions``, one for each new part, closed by ``[DONE]``."""

    closing = b"data: [DONE]\n\n"

    def __init__(self, answer: Answer, *, with_usage: bool):
        self._answer, self._with_usage = answer, with_usage

    def opening(self, number: int, output: RequestOutput) -> Iterable[bytes]:
        return [self._chunk([choice]) for choice in self._answer.opening(number, output)]

    def part(self, number: int, delta: CompletionOutput) -> Iterable[bytes]:
        choice = self._answer.part(number, delta)
        return [] if choice is None else [self._chunk([choice])]

    def ending(self, outputs: Sequence[RequestOutput], num_output: int) -> Iterable[bytes]:
        return [self._chunk([], self._answer.usage(outputs, num_output))] if self._with_usage else []

    def failure(self, error: ApiError) -> Iterable[bytes]:
        return [_data(error.body())]

    def pause(self) -> bytes:
        return COMMENT

    def _chunk(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> bytes:
        chunk = self._answer.chunk(choices)
        if self._with_usage:
            chunk["usage"] = usage
        return _data(msgspec.json.encode(chunk))


class EventStream(Response):
    """A response of events.

    The next event is made when the client has taken the one before: what came meanwhile goes into it.
    """

    def __init__(self, generation: Generation, writer: Writer, request_id: str, names: Mapping[str, str]):
        """``names`` are fields of the body by the engine's name for them."""
        self.status_code, self.background = 200, None
        self._generation, self._writer = generation, writer
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
        await send({"type": "http.response.body", "body": self._writer.closing, "more_body": False})

    async def _follow(self, receive: Receive) -> None:
        """Sends all events; an error is the last one."""
        keeping_alive = asyncio.ensure_future(self._keep_alive())
        try:
            await self._generation.follow(receive, self._send_new)
            outputs = [output for output in self._generation.outputs if output is not None]
            await self._send_all(self._writer.ending(outputs, sum(self._generation.num_tokens)))
        except ClientGoneError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # cancelled at the end of the drain timeout
            await self._send_all(self._writer.failure(as_api_error(error, self._request_id)))
        finally:
            keeping_alive.cancel()

    async def _send_new(self, number: int, output: RequestOutput) -> None:
        """Sends what is new in an output of prompt ``number``."""
        if number not in self._begun:
            self._begun.add(number)
            await self._send_all(self._writer.opening(number, output))
        if output.error is not None:
            raise ended(output, self._request_id, self._names)
        for completion in output.outputs:
            if (number, completion.index) in self._finished:
                continue
            if completion.finished:
                self._finished.add((number, completion.index))
            await self._send_all(self._writer.part(number, completion))

    async def _send_all(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._is_silent = False
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE)
            if self._is_silent:
                await self._send({"type": "http.response.body", "body": self._writer.pause(), "more_body": True})
            self._is_silent = True


def named_event(event: JsonObject) -> bytes:
    """An event that is named by its ``type``, as those of the Responses and the Messages API."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _data(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
