"""A scheduled batch as a command: the only place where a step looks at requests, sampling state and block tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..kv.table import BlockTables
from ..kv.table_rows import TableRows
from ..request import Request
from ..sampling.sample_row import SampleRow
from ..sampling.sample_tables import SampleTables
from .command import PromptScores, StepCommand
from .steady_batch import SteadyBatch, prompt_others, prompt_targets


class StepMaker:
    """Makes the commands of one backend, each of which brings what changed since the one before."""

    def __init__(self, rows: TableRows):
        self._rows = rows
        self._steady: SteadyBatch | None = None  # of the last command

    def make(
        self, batch: ScheduledBatch, rows: Mapping[Request, SampleRow], tables: BlockTables
    ) -> tuple[StepCommand, list[int]]:
        """The command of ``batch`` and the items that sample; ``rows`` and ``tables`` are read before this returns."""
        items, steady = batch.items, self._steady
        goes_on = steady is not None and steady.continues(items)
        if steady is None or not goes_on:
            steady = self._steady = SteadyBatch(items, rows)
        steady.note_positions(items)
        sampling, found = steady.sampling, None if steady.is_plain else SampleTables.pack(steady.states)
        if goes_on and self._rows.keep_up(tables):
            changes, counts = self._rows.take_changes(), self._rows.num_entries()
            return StepCommand(changes, counts, True, [], [], [], [], sampling, found, []), sampling
        table_rows = self._rows.follow(tables, [item.request.request_id for item in items])
        return StepCommand(
            changes=self._rows.take_changes(),
            num_blocks=self._rows.num_entries(),
            goes_on=False,
            rows=table_rows,
            starts=[item.start for item in items],
            lengths=[item.num_tokens for item in items],
            ids=_token_ids(items),
            sampling=sampling,
            tables=found,
            prompt_scores=[] if steady.is_decode else _prompt_scores(items),
        ), sampling

    def forget(self) -> None:
        """Has the next command bring everything; to be called when a command may not have been carried out."""
        self._steady = None
        self._rows.forget()


def _token_ids(items: Sequence[ScheduledRequest]) -> list[int]:
    """All token ids of a step; -1 stands for a request's last one on the device, which the host does not know yet."""
    ids, end = list[int](), 0
    for item in items:
        ids += item.request.token_ids[item.start : item.end]
        end += item.num_tokens
        ids += [-1] * (end - len(ids))
    return ids


def _prompt_scores(items: Sequence[ScheduledRequest]) -> list[PromptScores]:
    """Log-probabilities of the prompt tokens that follow each computed one, for the requests that ask."""
    wanted = ((i, item, item.request.params) for i, item in enumerate(items))
    found = (
        PromptScores(i, prompt_targets(item), params.prompt_logprobs, prompt_others(item))
        for i, item, params in wanted
        if params.prompt_logprobs is not None
    )
    return [scores for scores in found if scores.targets]
