"""Trials: after steps broke off repeatedly, each submission runs alone for some steps, to find the one at fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .submission import Submission

TRIAL_STEPS = 8  # of a submission alone, beside the steps that recompute its tokens
TRIAL_ATTEMPTS = 3  # broken steps in a row without a new token after which a submission fails: some faults are random


class Trials:
    """The turns in which submissions run alone. A submission that passes waits until all have been tried."""

    def __init__(self, submissions: Iterable[Submission], step_tokens: int):
        """``step_tokens`` are those that one step computes of a long prompt."""
        self._step_tokens = step_tokens
        self._untried = deque(submissions)
        self._current: Submission | None = None  # the one that runs alone now
        self._steps_left = 0
        self._num_failures = 0  # of the first untried submission, without a new token in between
        self._num_tokens = 0  # of that submission at its last failure

    @property
    def has_suspect(self) -> bool:
        """Whether a submission runs alone now."""
        return self._current is not None

    def has_another_step(self) -> bool:
        """Counts one step of the submission that runs alone; ``False`` if its turn is over."""
        if self._current is None:
            return False
        self._steps_left -= 1
        is_over = self._current.finished or self._steps_left <= 0
        if is_over:
            self._current, self._num_failures = None, 0
        return not is_over

    def next(self) -> Submission | None:
        """The submission whose turn begins; ``None`` once all were tried."""
        while self._untried:
            submission = self._untried.popleft()
            if not submission.finished:
                self._current = submission
                self._steps_left = TRIAL_STEPS + submission.num_known_tokens // self._step_tokens
                return submission
        return None

    def fail(self) -> Submission | None:
        """Notes a broken step. Returns the submission that ran alone if it is at fault; else it is tried again."""
        suspect, self._current = self._current, None
        if suspect is None:
            return None
        gained = suspect.num_known_tokens != self._num_tokens
        self._num_failures, self._num_tokens = 1 if gained else self._num_failures + 1, suspect.num_known_tokens
        if self._num_failures < TRIAL_ATTEMPTS:
            self._untried.appendleft(suspect)
            return None
        self._num_failures = 0
        return suspect
