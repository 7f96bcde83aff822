"""The engine's core, for one thread: schedule, run, turn tokens into text, stop, report.

A request that fails (bad logits, an error in its text, a step that only breaks with it) is ended with its error; the
others go on. Nothing here knows of threads; ``engine/serving/loop.py`` is the only caller.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest, Scheduler

from ..device.logprobs import TokenLogprobs
from ..device.memory import is_out_of_memory
from ..device.runner import Pending, Runner, StepResult
from ..device.sampler import SampledToken
from ..errors import EngineDeadError, QKVError, RequestError, as_request_error
from ..kv.block import Block
from ..kv.manager import KVManager
from ..metrics import Counters
from ..request import FINISHED, FinishReason, Request, SamplingParams
from ..sampling.sample_row import SampleRow
from ..text.tokenizer import Tokenizer
from .launched import Launched, NotLaunched, StepTimer
from .stream import OutputStream, wake
from .submission import Completion, Submission
from .trials import Trials

logger = logging.getLogger("qkv_engine")


class EngineCore:
    """Runs submissions to their end. ``live`` holds every one that has not ended, by request id.

    With ``runs_ahead`` a step is scheduled and launched while the tokens of the one before are still being computed, so
    that the host's work and the device's overlap. If a request turns out to have ended, its token from the step ahead
    is dropped. Only a request whose next token the host must prepare from the ones before (``needs_tokens``) waits for
    them. For asynchronous devices; on a synchronous one the last step would be wasted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        make_space: Callable[[], KVManager],
        *,
        runs_ahead: bool = False,
    ):
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.make_space = make_space  # new books over the cache, for ``recover``
        self.eos_ids = eos_ids
        self.runs_ahead = runs_ahead
        self.live: dict[str, Submission] = {}
        self.counters = Counters()
        self._owners: dict[Request, tuple[Submission, Completion]] = {}
        self._rows: dict[Request, SampleRow] = {}
        self._in_flight: deque[Launched] = deque()
        self._timer = StepTimer(scheduler.pace)
        self.last_step: tuple[int | None, float] | None = None  # its single tokens, None with chunks, and seconds
        self._suspects: set[Request] = set()  # live when a step broke off
        self._trials: Trials | None = None  # while the submission at fault is looked for

    @property
    def space(self) -> KVManager:
        """The scheduler's KV memory as the engine's own type, with methods beyond ``KVSpace``."""
        return cast(KVManager, self.scheduler.space)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or self._trials is not None

    def add(self, submission: Submission) -> None:
        """Takes a submission in; an error goes to its stream alone. May be called again after an interrupt."""
        if submission.finished:
            return
        if self.live.setdefault(submission.request_id, submission) is not submission:
            error = RequestError("a live request has this id", field="request_id", value=submission.request_id)
            submission.stream.fail(error)
            return
        self.counters.num_requests += not submission.completions
        if self._trials is None:
            self._try_to_begin(submission)

    def _try_to_begin(self, submission: Submission) -> None:
        try:
            self._begin(submission)
        except Exception as error:
            self.counters.num_refused += 1
            self._fail_submission(submission, as_request_error(error))

    def abort(self, request_id: str) -> None:
        """Ends a submission wherever it stands; an id that is not live is ignored."""
        submission = self.live.get(request_id)
        if submission is not None:
            self.drop(submission)

    def drop(self, submission: Submission) -> None:
        """Aborts a submission; one that is not live is ignored, even if another one has its id."""
        if self.live.get(submission.request_id) is not submission:
            return
        submission.make_completions()  # one that waits for trials to end may have none yet
        for completion in submission.completions:
            if not completion.request.is_finished:
                self._finish(completion, FinishReason.ABORT)
        self._report(submission)

    def fail_all(self, error: QKVError) -> None:
        """Ends every live submission with ``error``, raised to its reader."""
        for submission in list(self.live.values()):
            submission.stream.fail(error)
        self.live.clear()

    def reset_counters(self) -> None:
        """Starts counting anew; the peak of KV memory becomes the memory in use."""
        self.counters = Counters()
        self.scheduler.num_preemptions = 0
        self.runner.cache.reset_counters()

    def free(self) -> None:
        """Lets go of the model and the KV memory; the core can do nothing after that."""
        self._in_flight.clear()
        self._trials = None
        del self.runner, self.scheduler, self.make_space

    def step(self) -> None:
        """Launches the next step, then waits for the steps under way: all, or all but the new one if it may run ahead.

        Among suspects no step runs ahead, so a step that breaks off is the last one and can be narrowed down.
        """
        if self._trials is not None:
            self._go_on_with_trials(self._trials)
        self.last_step = None
        num_followed = len(self._in_flight)  # steps under way that the next one builds on
        began_at = time.monotonic()
        launched = self._launch(self.scheduler.schedule(), began_at)
        may_run_ahead = self.runs_ahead and launched and not self._suspects
        while len(self._in_flight) > may_run_ahead:
            self._collect(is_followed=num_followed > 0)
            num_followed -= 1
        self.counters.num_preemptions = self.scheduler.num_preemptions

    def _launch(self, batch: ScheduledBatch, began_at: float) -> bool:
        """Launches ``batch`` after its moves; ``False`` if it is empty or cannot be launched."""
        if not batch.items:
            return False
        moves = self.runner.launch_moves()
        for request in batch.started:
            metrics = self._owners[request][0].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = time.monotonic()
        pending: Pending | NotLaunched
        try:
            pending = self.runner.launch(batch, self._rows)
        except Exception as error:
            pending = NotLaunched(error)
        self._in_flight.append(Launched(batch, moves, pending, began_at))
        self.counters.num_steps += 1
        return not isinstance(pending, NotLaunched)

    def _collect(self, is_followed: bool) -> None:
        """Waits for the oldest step under way, and accepts its results.

        A step that broke off is run again, unless it ``is_followed``: then the books are ahead of its bytes.
        """
        step = self._in_flight.popleft()
        self._fail_holders(step.moves.wait())
        try:
            results = [step.pending.wait()]
        except Exception as error:
            if is_followed:
                raise  # everything starts over
            results = self._narrow_down(step.batch, error)
        self._accept_all(results)
        self.last_step = self._timer.note(step)

    def _accept_all(self, results: list[StepResult]) -> None:
        now, changed = time.monotonic(), dict[str, Submission]()
        for result in results:
            self._accept(result, now, changed)
        self._report(*changed.values())

    def _accept(self, result: StepResult, now: float, changed: dict[str, Submission]) -> None:
        """Accepts the results of a step; notes in ``changed`` the submissions to report."""
        special = result.special
        for index, (item, token_id) in enumerate(zip(result.items, result.token_ids, strict=True)):
            request = item.request
            if request.status is FINISHED:
                continue  # it ended while the step ran
            submission, completion = self._owners[request]
            try:
                if special and index in special:
                    self._accept_special(completion, special[index])
                self.scheduler.computed(item)
                if item.start < request.num_prompt_tokens:
                    self._accept_prompt(submission, completion, item, result.prompt_logprobs.get(index))
                if token_id is not None:
                    self._accept_token(submission, completion, token_id, now)
            except Exception as error:
                self._fail(submission, error)
            if submission.incremental or request.status is FINISHED:
                changed[submission.request_id] = submission

    def _accept_special(self, completion: Completion, token: SampledToken) -> None:
        if token.error is not None:
            raise token.error
        assert completion.logprobs is not None and token.logprobs is not None
        completion.logprobs.append(token.logprobs.entries(self._texts_of(completion.request.params)))

    def _accept_prompt(
        self, submission: Submission, completion: Completion, item: ScheduledRequest, found: list[TokenLogprobs] | None
    ) -> None:
        self.counters.prompt_tokens += min(item.end, item.request.num_prompt_tokens) - item.start
        if found is not None and completion.index == 0:
            submission.add_prompt_logprobs(item.start, found, self._texts_of(submission.params))

    def _accept_token(self, submission: Submission, completion: Completion, token_id: int, now: float) -> None:
        submission.note_time(completion.index, now)
        # From here on the token counts: interrupted before, it is computed again; after, ``_restore`` reads it.
        self.scheduler.append_token(completion.request, token_id)
        self.counters.generation_tokens += 1
        reason = completion.read_token(token_id)
        if reason is not None:
            self._finish(completion, reason)

    def count_restarts(self) -> int:
        """Counts one more recovery; returns the most that any submission saw since it last gained a token."""
        return max([submission.note_restart() for submission in list(self.live.values())], default=0)

    def recover(self, isolate: bool = False) -> bool:
        """After an unforeseen error or interrupt: new books, an empty cache, every live request is recomputed.

        Needs nothing but the live requests, their tokens and times, and may itself be interrupted and called again.
        With ``isolate`` each submission then runs alone for some steps, and fails if steps break off with it alone.
        Returns whether such trials began or came further. The caller has checked that the device still computes.
        """
        for submission in list(self.live.values()):
            for completion in submission.completions:
                self._note_usage(completion)
        self._in_flight.clear()
        self.runner.cache.reset()
        self.scheduler.recover(self.make_space())
        self._suspects = set(self.scheduler.requests.values())
        for submission in list(self.live.values()):
            try:
                self._restore(submission)
            except Exception as error:
                self._fail_submission(submission, as_request_error(error))
        return self._hold_trials(isolate)

    def _hold_trials(self, isolate: bool) -> bool:
        """Begins trials if asked, or goes on with them; returns whether they began or came a step further."""
        begin = isolate and self._trials is None
        if begin:
            self._trials = Trials(list(self.live.values()), self.scheduler.min_step_tokens)
        if self._trials is None:
            return False
        self.scheduler.withdraw_all()
        comes_further = begin or self._trials.has_suspect
        guilty = self._trials.fail()
        if guilty is not None and not guilty.finished:
            self._fail_submission(guilty, RequestError("steps of the engine break off with this request alone"))
        return comes_further

    def _go_on_with_trials(self, trials: Trials) -> None:
        """One more step for the submission on trial, or the turn of the next; at the end all go on together."""
        if trials.has_another_step():
            return
        self.runner.cache.reset()
        self.scheduler.recover(self.make_space())
        self.scheduler.withdraw_all()
        following = trials.next()
        self._trials = None if following is None else trials
        for submission in list(self.live.values()) if following is None else [following]:
            self._try_to_begin(submission)
        self._suspects = set(self.scheduler.requests.values())

    def _restore(self, submission: Submission) -> None:
        """Rebuilds the state that follows from a submission's tokens; ends it if its last token does."""
        times = submission.metrics.token_times
        for completion in submission.completions:
            self._enter(submission, completion)
            reason = completion.read()
            if completion.request.is_finished:
                self._close(completion)
            elif reason is not None:
                self._finish(completion, reason)
            if completion.index == 0:
                del times[completion.request.num_output_tokens :]
        if submission.error is not None:
            self._fail_submission(submission, submission.error)
        elif submission.finished:
            self._report(submission)

    def _fail_holders(self, bad: set[Block]) -> None:
        """Fails running requests that hold blocks with bad values; the blocks' owners may have ended meanwhile."""
        if not bad:
            return
        self.space.distrust(bad)
        error = RequestError("the KV cache holds values that are not finite", remedy="Try another dtype")
        for request in list(self.scheduler.running):
            if not (request.is_finished or bad.isdisjoint(self.space.tables[request.request_id])):
                self._fail_submission(self._owners[request][0], error)

    def _run(self, batch: ScheduledBatch) -> list[StepResult]:
        batch = batch.live()
        try:
            return [self.runner.run(batch, self._rows)] if batch.items else []
        except Exception as error:
            return self._narrow_down(batch, error)

    def _narrow_down(self, batch: ScheduledBatch, error: Exception) -> list[StepResult]:
        """Runs a batch that raised again in halves, until the request at fault stands alone, and fails.

        A chunk of a prompt for which there was no memory is halved, too. Raises ``error`` if it ends the engine.
        """
        if isinstance(error, EngineDeadError):
            raise error
        if len(batch.live()) < len(batch):
            return self._run(batch)  # a request that has ended meanwhile may have been at fault
        if len(batch) > 1 or (is_out_of_memory(error) and batch.num_tokens > 1):
            first, second = batch.halves()
            return self._run(first) + self._run(second)
        self.runner.check_device()
        for item in batch.items:
            self._fail(self._owners[item.request][0], error)
        return []

    def _fail(self, submission: Submission, error: Exception) -> None:
        """Ends a submission that failed while it ran."""
        is_own = isinstance(error, RequestError) and error.field is not None  # no fault of ours to be looked into
        logger.warning("request %s failed: %s", submission.request_id, error, exc_info=None if is_own else error)
        self._fail_submission(submission, as_request_error(error))

    def _finish(self, completion: Completion, reason: FinishReason, error: QKVError | None = None) -> None:
        request = completion.request
        if self.scheduler.requests.get(request.request_id) is request:
            self._note_usage(completion)
            self.scheduler.finish(request, reason, error=error)
        else:  # never came as far as the scheduler
            request.error, request.finish_reason = error, reason
            request.status = FINISHED
        self._close(completion)

    def _note_usage(self, completion: Completion) -> None:
        """Remembers the rungs of a request's blocks, while it has some."""
        if completion.request.request_id in self.space.tables:
            completion.kv = self.space.usage(completion.request)

    def _close(self, completion: Completion) -> None:
        """Drops the state of an ended request; text that was held back is output now."""
        self._owners.pop(completion.request, None)
        self._rows.pop(completion.request, None)
        self._suspects.discard(completion.request)
        if completion.output_text is not None and completion.request.error is None:
            completion.output_text.finish()

    def _fail_submission(self, submission: Submission, error: QKVError) -> None:
        submission.error = error
        requests = [completion.request for completion in submission.completions]
        began = any(self.scheduler.requests.get(request.request_id) is request for request in requests)
        for completion in submission.completions:
            if not completion.request.is_finished:
                self._finish(completion, FinishReason.ERROR, error)
        self.counters.num_failed += began
        self._report(submission)

    def _report(self, *submissions: Submission) -> None:
        """Hands the newest states to the readers. Repeating it is harmless; a reader it leaves out waits for ever."""
        told, ended = list[OutputStream](), list[Submission]()
        for submission in submissions:
            if self.live.get(submission.request_id) is not submission:
                continue
            finished = submission.finished
            if finished:
                submission.metrics.finished_time = time.monotonic()
                ended.append(submission)
            if finished or submission.incremental:
                submission.stream.put(submission.report(finished))
                told.append(submission.stream)
        wake(told)
        for submission in ended:
            del self.live[submission.request_id]
            self.counters.num_finished += submission.error is None

    def _begin(self, submission: Submission) -> None:
        """Adds to the scheduler the requests of a submission that it does not have."""
        submission.make_completions()
        for completion in submission.completions:
            request = completion.request
            if self.scheduler.requests.get(request.request_id) is not request and not request.is_finished:
                self._enter(submission, completion)
                completion.read()  # tokens of an earlier trial, none of which ended it
                self.scheduler.add(request)

    def _enter(self, submission: Submission, completion: Completion) -> None:
        """Files a completion, none of its tokens read yet."""
        request = completion.request
        completion.output_text = submission.output_text(self.tokenizer)
        completion.num_read, completion.cumulative_logprob = 0, None
        completion.ends = submission.ends(self.eos_ids)
        if completion.logprobs is not None:
            del completion.logprobs[request.num_output_tokens :]
        self._owners[request] = (submission, completion)
        self._rows[request] = row = submission.sample_row(request, self.eos_ids)
        request.needs_tokens = row.needs_tokens

    def _texts_of(self, params: SamplingParams) -> Tokenizer | None:
        """The tokenizer, where tokens are to have a text."""
        return self.tokenizer if params.detokenize else None
