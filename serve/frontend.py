"""The engine as endpoints use it: admission, submission off the event loop, outputs until the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from msgspec.structs import replace
from starlette.types import Receive

from qkv_engine import Engine, RequestError, RequestOutput, RequestOutputKind, RequestStream, SamplingParams
from qkv_engine.errors import CapacityError
from qkv_engine.intake import Conversation, Prompt
from qkv_engine.text.tokenizer import Tokenizer

from .errors import ApiError, ClientGoneError
from .fair_threads import FairThreads, Load
from .limits import Limits
from .metrics import Metrics
from .seats import Seats

FIRST_TOKEN = "qkv.first_token"  # extension of an ASGI scope: a function to be called once a token has come
TELL_SECONDS = 0.1  # between two looks for it
MAX_CONTEXTS = 4  # of text and of token ids, in contexts of the model, that are made into the other without a request

T = TypeVar("T")
OnOutput = Callable[[int, RequestOutput], Awaitable[None]]


class Frontend:
    """An engine behind names and limits. One event loop uses it."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        limits: Limits,
        *,
        num_tenants: int = 1,
        examples: Sequence[str] = (),
    ):
        """``names`` are those that a body's ``model`` may have; the first is the one that answers have.

        ``examples`` are questions that suit the model, for people who try it.
        """
        self.engine, self.names, self.limits, self.examples = engine, names, limits, examples
        self.metrics = Metrics(engine, names[0])
        self.created = int(time.time())
        self.seats, self.threads = Seats(limits.max_requests, is_shared=num_tenants > 1), FairThreads()
        self.is_stopping = False  # requests under way get to finish, others are refused
        self._metrics_thread = CapacityLimiter(1)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_tokens(self) -> int:
        """Of a text or token ids that are made into the other without a request."""
        return MAX_CONTEXTS * self.engine.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` for the name of another model; no name is this one."""
        if name is not None and name not in self.names:
            message = f"there is no model {name[:80]!r} here. Use {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def render_metrics(self) -> bytes:
        """The metrics in Prometheus' text format. Waits for the engine between two steps."""
        return await to_thread.run_sync(self.metrics.render, limiter=self._metrics_thread)

    async def submit(
        self,
        load: Load,
        prompts: Callable[[], Sequence[Prompt | Conversation]],
        changes: Callable[[], Mapping[str, Any]],
        request_id: str,
        *,
        number: int,
        template_kwargs: dict[str, Any] | None = None,
        is_streamed: bool,
        shortens: bool = False,
    ) -> Generation:
        """Makes, tokenizes and submits ``prompts`` in a thread; a streamed request's outputs hold what is new.

        ``changes`` makes the sampling parameters. ``number`` is that of all completions. With ``shortens`` a
        ``max_tokens`` that the context has no room for is cut to what it has. Raises ``ApiError``, and
        ``RequestError`` for an invalid request.
        """
        kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY

        def submit_all() -> list[RequestStream]:
            params = self.engine.params(**changes(), output_kind=kind)
            given, streams = prompts(), list[RequestStream]()
            try:
                for index, prompt in enumerate(given):
                    name = f"{request_id}-{index}" if len(given) > 1 else request_id
                    options: dict[str, Any] = {"request_id": name, "template_kwargs": template_kwargs}
                    streams.append(self._stream(prompt, params, options, shortens))
            except BaseException:
                for stream in streams:
                    stream.close()
                raise
            return streams

        self.seats.take(load.tenant, number)
        try:
            streams = await self.threads.run(load, submit_all)
        except BaseException:
            self.seats.give_back(load.tenant, number)
            raise
        return Generation(self, streams, load.tenant, number)

    def _stream(
        self, prompt: Prompt | Conversation, params: SamplingParams, options: dict[str, Any], shortens: bool
    ) -> RequestStream:
        try:
            return self.engine.stream(prompt, params, **options)
        except RequestError as error:
            if not (shortens and (error.field == "max_tokens" or isinstance(error, CapacityError))):
                raise
        return self.engine.stream(prompt, replace(params, max_tokens=None), **options)

    async def with_tokenizer(self, load: Load, function: Callable[[Tokenizer], T]) -> T:
        """The result of ``function`` on the tokenizer, in a thread. Raises ``RequestError`` for a bare shape."""
        with self.seats.held(load.tenant):
            return await self.threads.run(load, lambda: function(self.tokenizer))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``RequestError`` for a bare shape."""
        found = self.engine.tokenizer
        if found is None:
            raise RequestError("this model has no tokenizer", remedy="Give token ids to /v1/completions")
        return found


class Generation:
    """The engine's requests of one HTTP request, a stream a prompt. ``close`` aborts what still runs."""

    def __init__(self, frontend: Frontend, streams: list[RequestStream], tenant: str, number: int):
        self.outputs: list[RequestOutput | None] = [None] * len(streams)  # the newest
        self.num_tokens = [0] * len(streams)  # output tokens of each prompt
        self._frontend, self._streams = frontend, streams
        self._tenant, self._number = tenant, number

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

    async def result(self, receive: Receive, on_token: Callable[[], None] | None) -> list[RequestOutput]:
        """The finished output of each prompt; ``on_token`` is called once there is a token.

        Raises the errors of ``follow``.
        """

        async def ignore(number: int, output: RequestOutput) -> None:
            pass

        telling = None if on_token is None else asyncio.ensure_future(self._tell(on_token))
        try:
            await self.follow(receive, ignore)
        finally:
            if telling is not None:
                telling.cancel()
        return [output for output in self.outputs if output is not None]

    def close(self) -> None:
        """Aborts what still runs, and counts all completions out. May be called again."""
        self._frontend.seats.give_back(self._tenant, self._number)
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

    async def _tell(self, on_token: Callable[[], None]) -> None:
        while not any(stream.has_token for stream in self._streams):
            await asyncio.sleep(TELL_SECONDS)
        on_token()

    async def _read(self, number: int, on_output: OnOutput) -> None:
        async for output in self._streams[number]:
            self.outputs[number] = output
            self.num_tokens[number] += sum(len(completion.token_ids) for completion in output.outputs)
            await on_output(number, output)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
