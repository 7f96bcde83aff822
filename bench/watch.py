"""What whoever waits for a measurement may follow: requests handed over together, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.request import SamplingParams


class Watched(Protocol):
    """An engine whose counters were set to zero before the work began."""

    def stats(self) -> EngineStats: ...


class Work(NamedTuple):
    """Requests handed over together: their name, their number, the tokens they may have, prompts included.

    ``share`` is the part of a row that they are, 1 unless several runs make one row.
    """

    name: str
    num_requests: int
    num_tokens: int
    share: float = 1.0

    def done(self, stats: EngineStats) -> float:
        """The part of the work that is done, from 0 to 1, by tokens or by requests, whichever is further."""
        requests = (stats.num_finished + stats.num_failed) / self.num_requests
        tokens = (stats.prompt_tokens + stats.generation_tokens) / self.num_tokens
        return min(1.0, max(requests, tokens))


Watch = Callable[[Work, Watched], AbstractContextManager[None]]


def no_watch(work: Work, engine: Watched) -> AbstractContextManager[None]:
    """Nobody looks."""
    return nullcontext()


def work_of(
    name: str, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], share: float = 1.0
) -> Work:
    """The work of ``prompts``, each with its own of ``params`` or all with the same."""
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    num_tokens = sum(len(prompt) + (one.max_tokens or 1) for prompt, one in zip(prompts, each, strict=True))
    return Work(name, len(prompts), num_tokens, share)
