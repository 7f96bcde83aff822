"""What one step computes: which requests, how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass

from qkv_engine.request import Request


class ScheduledRequest:
    """``num_tokens`` tokens of ``request``, from position ``start`` to before ``end``, run in this step.

    ``samples`` says that the step reaches the last token, so that its logits give the next one. Only a single token,
    and one that such a step samples, may be in flight.
    """

    __slots__ = ("end", "num_tokens", "request", "samples", "start")

    def __init__(self, request: Request, start: int, num_tokens: int):
        self.request, self.start, self.num_tokens = request, start, num_tokens
        self.end = start + num_tokens
        self.samples = self.end == request.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work: single-token requests first, then chunks of prompts."""

    items: list[ScheduledRequest]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    def halves(self) -> tuple[ScheduledBatch, ScheduledBatch]:
        """The batch cut in two, to find out which request makes a step fail."""
        middle = len(self.items) // 2
        return ScheduledBatch(self.items[:middle]), ScheduledBatch(self.items[middle:])

    def live(self) -> ScheduledBatch:
        """The batch without requests that ended meanwhile."""
        return ScheduledBatch([item for item in self.items if not item.request.is_finished])

    def __len__(self) -> int:
        return len(self.items)
