"""Tokens that requests were given and that nobody has read yet, of steps that end none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from qkv_engine.scheduler import ScheduledRequest, Scheduler

from ..device.cohort import Cohort
from ..device.runner import StepResult
from ..request import Request
from .submission import Completion, Submission

MOST_UNREAD = 32  # tokens of a request
PATIENCE = 4  # steps of a cohort before one is taken: to begin and to catch up cost as much as some steps read at once


class Reader(NamedTuple):
    """What the tokens of one request are read into. ``first`` of the submission's tokens had their times before."""

    submission: Submission
    completion: Completion
    first: int


class Unread:
    """Takes the steps of one cohort: the requests have their tokens at once, which are read later.

    Read means turned into text and given their times. Every step reads those of a few requests, in turn, so that hardly
    anything of the others is looked at. Steps in which a request may end are not taken, and none at all if one is
    watched. Of no use any more once a request has ended, or got a token in another way.
    """

    def __init__(self, cohort: Cohort | None = None):
        """Without a cohort nothing is taken."""
        self.cohort = cohort
        self._patience = 0 if cohort is None else PATIENCE
        self._readers: list[Reader] = []
        self._known: list[list[int]] = []  # all tokens of each request
        self._ends: set[int] = set()  # tokens that end one of them
        self._num_steps = 0  # before one of them gets its last token
        self._filing: dict[int, list[int]] = {}  # by step, who may have blocks to file then
        self._times: list[float] = []  # of the steps taken

    @property
    def is_empty(self) -> bool:
        """Whether it has not begun, so that no step was taken."""
        return not self._readers

    def prepare(self, result: StepResult, owners: Mapping[Request, tuple[Submission, Completion]]) -> None:
        """Before each step of the cohort: begins with ``result`` if the cohort has gone on for long enough.

        All tokens before it must have been read. Nothing is ever taken if a request has ended or is watched.
        """
        if not self._patience:
            return
        self._patience -= 1
        if not self._patience:
            found = [owners[item.request] for item in result.items if item.request in owners]
            if len(found) == len(result.items) and not any(submission.is_watched for submission, _ in found):
                self._begin(result.items, found)

    def _begin(self, items: Sequence[ScheduledRequest], owners: Iterable[tuple[Submission, Completion]]) -> None:
        requests = [item.request for item in items]
        self._readers = [Reader(*owner, len(owner[0].metrics.token_times)) for owner in owners]
        self._known = [request.token_ids for request in requests]
        self._ends.update(*[reader.completion.ends for reader in self._readers])
        for index, item in enumerate(items):
            self._note_filing(index, item, 0)
        self._num_steps = min([request.max_num_tokens - len(request.token_ids) for request in requests])

    def take(self, result: StepResult, now: float, scheduler: Scheduler) -> bool:
        """Gives the requests their tokens if the step ends none of them; otherwise returns ``False``."""
        if len(self._times) >= self._num_steps or result.special or not self._ends.isdisjoint(result.token_ids):
            return False
        if not self._file(result, scheduler):
            return False
        self._times.append(now)
        # From here on the tokens count, whatever happens: each that is known finds its time.
        scheduler.append_tokens(self._known, cast(Sequence[int], result.token_ids))  # all of a cohort sample
        return True

    def _file(self, result: StepResult, scheduler: Scheduler) -> bool:
        """Tells the scheduler of those with blocks to file; ``False`` if one fails, who may be told again."""
        step = len(self._times)
        for index in self._filing.pop(step, ()):
            item = result.items[index]
            try:
                scheduler.computed(item)
            except Exception:
                return False
            self._note_filing(index, item, step + 1)
        return True

    def _note_filing(self, index: int, item: ScheduledRequest, least: int) -> None:
        """Finds the step, ``least`` or later, in which a request comes to where it files."""
        step = len(self._times) + item.request.files_at - item.end
        self._filing.setdefault(max(step, least), []).append(index)

    def read_some(self) -> dict[Submission, Exception]:
        """After a step: reads the tokens of those whose turn it is; returns who failed."""
        return self._read(self._readers[len(self._times) % MOST_UNREAD :: MOST_UNREAD])

    def read_all(self) -> dict[Submission, Exception]:
        """Reads what is left; returns who failed."""
        return self._read(self._readers)

    def note_times(self) -> None:
        """Gives all known tokens their times, and perhaps one that was about to be known."""
        for reader in self._readers:
            self._note_times(reader)

    def _read(self, readers: Iterable[Reader]) -> dict[Submission, Exception]:
        failed: dict[Submission, Exception] = {}
        for reader in readers:
            self._note_times(reader)
            try:
                reader.completion.read_on()
            except Exception as error:
                failed[reader.submission] = error
        return failed

    def _note_times(self, reader: Reader) -> None:
        submission, index = reader.submission, reader.completion.index
        num_noted = 0 if index else len(submission.metrics.token_times) - reader.first
        if num_noted < len(self._times):
            submission.note_times(index, self._times[num_noted:])
