"""Facts about a decode batch that stay valid while the same requests keep decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkv_engine.scheduler import ScheduledRequest

from ..request import Request
from ..sampling.sample_row import SampleRow


class SteadyBatch:
    """A step's requests, in order, and how they are sampled: computed once for a run of decode steps.

    ``sampling``: indices of the items that sample a token; ``states``: their sampling state. ``is_plain``: nothing but
    greedy tokens is asked for. ``is_decode``: the step is made of single tokens alone, and no prompt log-probabilities
    are asked for.
    """

    def __init__(self, items: Sequence[ScheduledRequest], rows: Mapping[Request, SampleRow]):
        self.sampling = [i for i, item in enumerate(items) if item.samples]
        self.states = [rows[items[i].request] for i in self.sampling]
        self.is_plain = False not in [state.is_plain for state in self.states]
        self.is_decode = _is_decode(items)
        self._requests = [item.request for item in items]
        self._ends = [item.end for item in items]

    def continues(self, items: Sequence[ScheduledRequest]) -> bool:
        """Advances to ``items`` if they are the same requests in order, each with the token that the last step sampled.

        Otherwise returns ``False``, and the batch is no longer valid.
        """
        if not self.is_decode or len(self.sampling) < len(self._requests):
            return False
        if [item.request for item in items] != self._requests or [item.start for item in items] != self._ends:
            return False
        self._ends = [item.end for item in items]
        return True

    def note_positions(self, items: Sequence[ScheduledRequest]) -> None:
        """Updates ``num_in_flight`` of the rows that are not plain: their edits or draws depend on the position."""
        if self.is_plain:
            return
        for i, state in zip(self.sampling, self.states, strict=True):
            if not state.is_plain:
                state.num_in_flight = items[i].end - len(state.token_ids)


def prompt_targets(item: ScheduledRequest) -> list[int]:
    """Prompt tokens that follow an item's tokens, the targets of prompt log-probabilities."""
    return item.request.prompt_token_ids[item.start + 1 : item.end + 1]


def prompt_others(item: ScheduledRequest) -> list[list[int]]:
    """Token ids whose log-probabilities are wanted beside each of ``prompt_targets``; none where no others are."""
    return (item.request.params.prompt_logprob_ids or [])[item.start + 1 : item.end + 1]


def _is_decode(items: Sequence[ScheduledRequest]) -> bool:
    """Whether a step is made of single tokens alone (they come first), without prompt log-probabilities to compute."""
    if items[-1].num_tokens > 1:
        return False
    return not any(item.request.params.prompt_logprobs is not None and prompt_targets(item) for item in items)
