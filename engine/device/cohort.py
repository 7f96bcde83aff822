"""The requests of a step, and what a step that goes on with them need not find out again."""

from __future__ import annotations

from collections.abc import Mapping

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..request import Request
from ..sampling.sample_row import SampleRow


class Cohort:
    """What is true of a step's requests, in their order, for as long as they decode together.

    ``sampling`` are the indices of those that sample a token, ``states`` their rows. ``is_plain`` says that the
    likeliest tokens are all that is asked for; ``is_decode`` that the step is made of single tokens alone, of which
    nothing but the next ones is wanted.
    """

    def __init__(self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow]):
        items = batch.items
        self.sampling = [i for i, item in enumerate(items) if item.samples]
        self.states = [rows[items[i].request] for i in self.sampling]
        self.is_plain = False not in [state.is_plain for state in self.states]
        self.is_decode = _is_decode(items)
        self._members = batch.members

    def goes_on(self, batch: ScheduledBatch) -> bool:
        """Whether ``batch`` has the next tokens of the same requests, all of which the batch before it sampled.

        That one must have been the cohort's. If so, what the cohort says is true of ``batch`` too.
        """
        return self.is_decode and self._members is not None and batch.members is self._members

    def note_positions(self, items: list[ScheduledRequest]) -> None:
        """Tells rows whose edits or draws depend on it how many tokens before the next one are in flight."""
        if self.is_plain:
            return
        for i, state in zip(self.sampling, self.states, strict=True):
            if not state.is_plain:
                state.num_in_flight = items[i].end - len(state.token_ids)


def prompt_targets(item: ScheduledRequest) -> list[int]:
    """The prompt tokens that follow an item's."""
    return item.request.prompt_token_ids[item.start + 1 : item.end + 1]


def _is_decode(items: list[ScheduledRequest]) -> bool:
    """Whether a step is made of single tokens, which come first, of which nothing but the next ones is wanted."""
    if items[-1].num_tokens > 1:
        return False
    return not any(item.request.params.prompt_logprobs is not None and prompt_targets(item) for item in items)
