"""Progress of a measurement: requests handed over together, and the tokens that they have so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.request import SamplingParams


PROMPT_TOKEN = 1 / 16  # of an output token's time, roughly: prompts are read many tokens at once


class Watched(Protocol):
    """An engine whose counters were set to zero before the work began."""

    def stats(self) -> EngineStats: ...


class Work(NamedTuple):
    """Requests handed over together: their name, their number, the tokens of their prompts and, at most, outputs.

    ``share`` is the part of a row that they are, 1 unless several runs make one row.
    """

    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    share: float = 1.0

    def done(self, stats: EngineStats) -> float:
        """The part of the work that is done, from 0 to 1, by tokens or by requests, whichever is further."""
        requests = (stats.num_finished + stats.num_failed) / self.num_requests
        tokens = PROMPT_TOKEN * min(stats.prompt_tokens, self.prompt_tokens) + stats.generation_tokens
        return min(1.0, max(requests, tokens / (PROMPT_TOKEN * self.prompt_tokens + self.output_tokens)))


Watch = Callable[[Work, Watched], AbstractContextManager[None]]


def no_watch(work: Work, engine: Watched) -> AbstractContextManager[None]:
    """The watch that shows nothing."""
    return nullcontext()


def work_of(
    name: str, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], share: float = 1.0
) -> Work:
    """The work of ``prompts``, each with its own of ``params`` or all with the same."""
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    return Work(name, len(prompts), sum(map(len, prompts)), sum(one.max_tokens or 1 for one in each), share)
