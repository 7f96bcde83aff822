"""Trials: after steps broke off again and again, each submission runs alone for some steps, to find the guilty one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .submission import Submission

TRIAL_STEPS = 8  # of a submission alone; more than its prompt and first tokens usually take


class Trials:
    """Whose turn it is to run alone. A submission that passes waits until all have been tried."""

    def __init__(self, submissions: Iterable[Submission]):
        self.current: Submission | None = None  # runs alone now
        self._untried = deque(submissions)
        self._steps_left = 0

    def has_another_step(self) -> bool:
        """Counts one step of the submission that runs alone; ``False`` if its turn is over."""
        self._steps_left -= 1
        return self.current is not None and not self.current.finished and self._steps_left > 0

    def next(self) -> Submission | None:
        """The submission whose turn begins; ``None`` once all were tried."""
        self._steps_left = TRIAL_STEPS
        self.current = None
        while self._untried and self.current is None:
            submission = self._untried.popleft()
            self.current = None if submission.finished else submission
        return self.current
