"""What one step computes: which requests, how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkv_engine.request import Request


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """``num_tokens`` tokens of ``request``, from position ``start`` to before ``end``, run in this step.

    ``samples`` says that the step reaches the last token, so that its logits give the next one. Only a single token,
    and one that such a step samples, may be in flight.
    """

    request: Request
    start: int
    num_tokens: int
    end: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens
        self.samples = self.end == self.request.num_tokens


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

    def __len__(self) -> int:
        return len(self.items)
