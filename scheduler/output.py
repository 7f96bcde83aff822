"""One step's work: the requests and their numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from qkv_engine.request import Request


class ScheduledRequest(msgspec.Struct, eq=False, gc=False):
    """``num_tokens`` tokens of ``request``, from position ``start`` to before ``end``, run in this step.

    ``samples``: the step reaches the request's last token, so its logits give the next one. An item whose
    token is in flight, sampled by the step before, is a single token. Every step makes one object a request, cheaply.
    """

    request: Request
    start: int
    num_tokens: int
    end: int
    samples: bool

    @classmethod
    def of(cls, request: Request, start: int, num_tokens: int) -> ScheduledRequest:
        """Some tokens of ``request`` as far as they are known or in flight now."""
        end = start + num_tokens
        return cls(request, start, num_tokens, end, end == request.num_tokens)

    def halves(self) -> tuple[ScheduledRequest, ScheduledRequest]:
        """A chunk of at least two tokens as two chunks, the second of which samples if the whole does."""
        first, middle = self.num_tokens // 2, self.start + self.num_tokens // 2
        return (
            ScheduledRequest(self.request, self.start, first, middle, False),
            ScheduledRequest(self.request, middle, self.num_tokens - first, self.end, self.samples),
        )


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work: single-token requests first, then chunks of prompts. ``started``: requests that began to run."""

    items: list[ScheduledRequest]
    started: Sequence[Request] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of the chunks."""
        if not self.items or self.items[-1].num_tokens == 1:
            return 0
        return sum(item.num_tokens for item in self.items if item.num_tokens > 1)

    @property
    def has_single_tokens(self) -> bool:
        return self.items[0].num_tokens == 1

    def halves(self) -> tuple[ScheduledBatch, ScheduledBatch]:
        """The batch cut in two, to find out which request makes a step fail; a single chunk becomes two chunks."""
        if len(self.items) == 1:
            first, second = self.items[0].halves()
            return ScheduledBatch([first]), ScheduledBatch([second])
        middle = len(self.items) // 2
        return ScheduledBatch(self.items[:middle]), ScheduledBatch(self.items[middle:])

    def live(self) -> ScheduledBatch:
        """The batch without requests that ended meanwhile."""
        return ScheduledBatch([item for item in self.items if not item.request.is_finished])

    def __len__(self) -> int:
        return len(self.items)
