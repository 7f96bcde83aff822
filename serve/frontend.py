"""The engine as endpoints use it: admission, submission off the event loop, outputs until the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.types import Receive

from qkv_engine import Engine, RequestError, RequestOutput, RequestOutputKind, RequestStream
from qkv_engine.intake import Conversation, Prompt
from qkv_engine.text.tokenizer import Tokenizer

from .errors import ApiError, ClientGoneError
from .limits import Limits
from .metrics import Metrics

INTAKE_THREADS = 8  # prompts tokenized at once; one of 8 MiB takes about a second
RETRY_AFTER = 1  # seconds after which a refused client may try again

T = TypeVar("T")
OnOutput = Callable[[int, RequestOutput], Awaitable[None]]


class Frontend:
    """An engine behind names and limits. One event loop uses it."""

    def __init__(self, engine: Engine, names: Sequence[str], limits: Limits):
        """``names`` are those that a body's ``model`` may have; the first is the one that answers have."""
        self.engine, self.names, self.limits = engine, names, limits
        self.metrics = Metrics(engine, names[0])
        self.created = int(time.time())
        self._num_live = 0  # completions of requests that have not ended
        self._threads = CapacityLimiter(INTAKE_THREADS)
        self._metrics_thread = CapacityLimiter(1)

    @property
    def name(self) -> str:
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` for the name of another model; no name is this one."""
        if name is not None and name not in self.names:
            message = f"there is no model {name[:80]!r} here. Use {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_room(self, number: int = 1) -> None:
        """Raises ``ApiError`` where ``number`` more completions are more than the limit."""
        most = self.limits.max_requests
        if number > most:
            raise ApiError(400, f"{number} completions in one request; the server takes {most} at once", param="n")
        if self._num_live + number > most:
            message = f"{self._num_live} completions are under way, of at most {most}"
            headers = {"retry-after": str(RETRY_AFTER)}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    async def render_metrics(self) -> bytes:
        """The metrics in Prometheus' text format. Waits for the engine between two steps."""
        return await to_thread.run_sync(self.metrics.render, limiter=self._metrics_thread)

    async def submit(
        self,
        prompts: Sequence[Prompt | Conversation],
        changes: Mapping[str, Any],
        request_id: str,
        *,
        template_kwargs: dict[str, Any] | None = None,
        is_streamed: bool,
    ) -> Generation:
        """Tokenizes and submits prompts in a thread; a streamed request's outputs hold what is new.

        Raises ``ApiError``, and ``RequestError`` for an invalid request.
        """
        kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
        number = len(prompts) * max(changes.get("n", 1), 1)
        self.check_room(number)

        def submit_all() -> list[RequestStream]:
            params = self.engine.params(**changes, output_kind=kind)
            streams: list[RequestStream] = []
            try:
                for index, prompt in enumerate(prompts):
                    name = f"{request_id}-{index}" if len(prompts) > 1 else request_id
                    stream = self.engine.stream(prompt, params, request_id=name, template_kwargs=template_kwargs)
                    streams.append(stream)
            except BaseException:
                for stream in streams:
                    stream.close()
                raise
            return streams

        self._num_live += number
        try:
            streams = await to_thread.run_sync(submit_all, limiter=self._threads)
        except BaseException:
            self._num_live -= number
            raise
        return Generation(self, streams, number)

    async def with_tokenizer(self, function: Callable[[Tokenizer], T]) -> T:
        """The result of ``function`` on the tokenizer, in a thread. Raises ``RequestError`` for a bare shape."""
        return await to_thread.run_sync(function, self._tokenizer, limiter=self._threads)

    @property
    def _tokenizer(self) -> Tokenizer:
        found = self.engine.tokenizer
        if found is None:
            raise RequestError("this model has no tokenizer", remedy="Give token ids to /v1/completions")
        return found

    def end(self, number: int) -> None:
        """Counts ``number`` completions out."""
        self._num_live -= number


class Generation:
    """The engine's requests of one HTTP request, a stream a prompt. ``close`` aborts what still runs."""

    def __init__(self, frontend: Frontend, streams: list[RequestStream], number: int):
        self.outputs: list[RequestOutput | None] = [None] * len(streams)  # the newest
        self.num_tokens = [0] * len(streams)  # output tokens of each prompt
        self._frontend, self._streams, self._number = frontend, streams, number

    async def follow(self, receive: Receive, on_output: OnOutput) -> None:
        """Calls ``on_output`` with the number of a prompt and each new output of it, until all have finished.

        Raises ``ClientGoneError``, ``ApiError`` for a request that takes too long, and the engine's errors.
        """
        seconds = self._frontend.limits.request_timeout
        reads = [asyncio.ensure_future(self._read(number, on_output)) for number in range(len(self._streams))]
        reading = asyncio.gather(*reads)
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((reading, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            elif leaving.done():
                raise ClientGoneError
            else:
                raise ApiError(504, f"the request did not end within {seconds:g} s", code="timeout")
        finally:
            for task in (*reads, leaving):
                task.cancel()
            await asyncio.gather(*reads, reading, leaving, return_exceptions=True)

    async def result(self, receive: Receive) -> list[RequestOutput]:
        """The finished output of each prompt. Raises the errors of ``follow``."""

        async def ignore(number: int, output: RequestOutput) -> None:
            pass

        await self.follow(receive, ignore)
        return [output for output in self.outputs if output is not None]

    def close(self) -> None:
        """Aborts what still runs, and counts all completions out. May be called again."""
        self._frontend.end(self._number)
        self._number = 0
        for stream in self._streams:
            stream.close()
        metrics, outputs = self._frontend.metrics, self.outputs
        self._streams, self.outputs = [], []
        for output, num_tokens in zip(outputs, self.num_tokens, strict=False):
            if output is not None and output.finished:
                metrics.note_finished(output, num_tokens)
            else:
                metrics.note_aborted()

    async def _read(self, number: int, on_output: OnOutput) -> None:
        async for output in self._streams[number]:
            self.outputs[number] = output
            self.num_tokens[number] += sum(len(completion.token_ids) for completion in output.outputs)
            await on_output(number, output)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
