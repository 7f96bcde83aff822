"""Recovery of steps that break off: run again in halves, everything recomputed, submissions tried one by one."""

from __future__ import annotations

from collections.abc import Callable

from qkv_engine.scheduler import ScheduledBatch, Scheduler

from ..device.memory import is_out_of_memory
from ..device.runner import Runner, StepResult
from ..errors import EngineDeadError, RequestError
from ..kv.block import Block
from ..kv.manager import KVManager
from .registry import Registry
from .trials import Trials


class Recovery:
    """Finds the request at fault and ends it; all others go on."""

    def __init__(self, registry: Registry, scheduler: Scheduler, runner: Runner, make_space: Callable[[], KVManager]):
        """``make_space`` makes new books over the cache."""
        self._registry, self._scheduler, self._runner = registry, scheduler, runner
        self.make_space = make_space
        self._trials: Trials | None = None  # while the submission at fault is looked for

    @property
    def in_trials(self) -> bool:
        """Whether submissions run one by one."""
        return self._trials is not None

    def restart(self, isolate: bool) -> bool:
        """New books and an empty cache; every live request is recomputed. May be interrupted and called again.

        With ``isolate`` each submission then runs alone for some steps, and fails if steps break off with it alone.
        Returns whether such trials began or came further.
        """
        registry = self._registry
        for submission in list(registry.live.values()):
            for completion in submission.completions:
                registry.note_usage(completion)
        self._renew_books()
        registry.suspects = set(self._scheduler.requests.values())
        for submission in list(registry.live.values()):
            registry.restore(submission)
        return self._hold_trials(isolate)

    def _renew_books(self) -> None:
        self._runner.cache.reset()
        self._scheduler.recover(self.make_space())

    def _hold_trials(self, isolate: bool) -> bool:
        """Begins trials if asked, or goes on with them; returns whether they began or came a step further."""
        begin = isolate and self._trials is None
        if begin:
            self._trials = Trials(list(self._registry.live.values()), self._scheduler.min_step_tokens)
        if self._trials is None:
            return False
        self._scheduler.withdraw_all()
        comes_further = begin or self._trials.has_suspect
        suspect = self._trials.fail()
        if suspect is not None and not suspect.finished:
            self._registry.end(suspect, RequestError("steps of the engine break off with this request alone"))
        return comes_further

    def go_on_with_trials(self) -> None:
        """One more step for the submission that runs alone, or the turn of the next; at the end all go on together."""
        trials, registry = self._trials, self._registry
        if trials is None or trials.has_another_step():
            return
        self._renew_books()
        self._scheduler.withdraw_all()
        following = trials.next()
        self._trials = None if following is None else trials
        for submission in list(registry.live.values()) if following is None else [following]:
            registry.begin(submission)
        registry.suspects = set(self._scheduler.requests.values())

    def fail_holders(self, bad: set[Block]) -> None:
        """Fails running requests that hold blocks with bad values; the blocks' owners may have ended meanwhile."""
        if not bad:
            return
        registry = self._registry
        registry.space.distrust(bad)
        error = RequestError("the KV cache holds values that are not finite", remedy="Try another dtype")
        for request in list(self._scheduler.running):
            if not (request.is_finished or bad.isdisjoint(registry.space.tables.blocks(request.request_id))):
                registry.end(registry.owners[request][0], error)

    def run_again(self, batch: ScheduledBatch, error: Exception) -> list[StepResult]:
        """Runs a batch that raised again in halves, until the request at fault stands alone, and fails.

        A chunk of a prompt for which there was no memory is halved, too, but in a deterministic engine. Raises
        ``error`` if it ends the engine, or if states may have been written already that tokens before the batch had
        left: everything starts over.
        """
        is_repeatable = not self._registry.space.spec.has_states or not any(item.start for item in batch.items)
        if isinstance(error, EngineDeadError) or not is_repeatable:
            raise error
        if len(batch.live()) < len(batch):
            return self._run(batch)  # a request that has ended meanwhile may have been at fault
        may_halve = is_out_of_memory(error) and batch.num_tokens > 1 and not self._scheduler.deterministic
        if len(batch) > 1 or may_halve:
            first, second = batch.halves()
            return self._run(first) + self._run(second)
        self._runner.check_device()
        for item in batch.items:
            self._registry.fail(self._registry.owners[item.request][0], error)
        return []

    def _run(self, batch: ScheduledBatch) -> list[StepResult]:
        batch = batch.live()
        try:
            return [self._runner.run(batch, self._registry.rows)] if batch.items else []
        except Exception as error:
            return self.run_again(batch, error)
