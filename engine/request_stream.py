"""``RequestStream``: the outputs of one request, for sync and async callers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .closable import Closable
from .request import RequestOutput
from .serving.submission import Submission

if TYPE_CHECKING:
    from .engine import Engine


class RequestStream(Closable, Iterator[RequestOutput]):
    """The outputs of one request as they come, for ``for`` or ``async for``; keeps its engine alive.

    ``close``, the end of a ``with`` block and dropping the stream abort the request if it still runs.
    """

    _finished = True  # until there is something to abort

    def __init__(self, engine: Engine, submission: Submission):
        self.request_id = submission.request_id
        self._engine, self._submission = engine, submission
        self._finished = False

    @property
    def has_token(self) -> bool:
        """Whether its first output token has come, reported or not."""
        return self._submission.metrics.first_token_time is not None

    def __next__(self) -> RequestOutput:
        if self._finished:
            raise StopIteration
        if self._engine._loop.is_own_thread:
            self._engine._check_callable()
        output = self._submission.stream.get()
        assert output is not None
        self._finished = output.finished
        return output

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        output = await self._submission.stream.get_async()
        self._finished = output.finished
        return output

    def close(self) -> None:
        """Aborts the request if it still runs; the iteration is over."""
        if not self._finished:
            self._engine._loop.drop(self._submission)
            self._finished = True  # last: interrupted above, it is done again

    def __del__(self) -> None:
        try:
            self.close()
        except KeyboardInterrupt:  # Python would drop it here, with the close undone
            self.close()
