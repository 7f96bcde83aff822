"""The submissions that have not ended, and the state that the engine keeps of each of their requests."""

from __future__ import annotations

import logging
import time
from typing import cast

from qkv_engine.scheduler import Scheduler

from ..errors import QKVError, RequestError, as_request_error
from ..kv.manager import KVManager
from ..metrics import Counters
from ..request import FINISHED, FinishReason, Request
from ..sampling.sample_row import SampleRow
from ..text.tokenizer import Tokenizer
from .stream import OutputStream, wake
from .submission import Completion, Submission

logger = logging.getLogger("qkv_engine")


class Registry:
    """Begins, ends and reports submissions.

    Fields
        live: every submission that has not ended, by request id.
        owners, rows: submission and completion of each request, and its sampling state.
        suspects: requests that were live when a step broke off.
        counters: of what came and how it ended.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, eos_ids: frozenset[int]):
        self._scheduler, self._tokenizer, self._eos_ids = scheduler, tokenizer, eos_ids
        self.live: dict[str, Submission] = {}
        self.owners: dict[Request, tuple[Submission, Completion]] = {}
        self.rows: dict[Request, SampleRow] = {}
        self.suspects: set[Request] = set()
        self.counters = Counters()

    @property
    def space(self) -> KVManager:
        """The scheduler's KV memory as the engine's own type, with methods beyond ``KVSpace``."""
        return cast(KVManager, self._scheduler.space)

    def begin(self, submission: Submission) -> None:
        """Adds to the scheduler the requests of a submission that it does not have; ends it if one is refused."""
        try:
            self._begin(submission)
        except Exception as error:
            self.counters.num_refused += 1
            self.end(submission, as_request_error(error))

    def _begin(self, submission: Submission) -> None:
        submission.make_completions()
        for completion in submission.completions:
            request = completion.request
            if self._scheduler.requests.get(request.request_id) is not request and not request.is_finished:
                self._enter(submission, completion)
                completion.read()  # tokens of an earlier trial, none of which ended it
                self._scheduler.add(request)

    def restore(self, submission: Submission) -> None:
        """Rebuilds the state that follows from a submission's tokens; ends it if its last token does."""
        try:
            self._restore(submission)
        except Exception as error:
            self.end(submission, as_request_error(error))

    def _restore(self, submission: Submission) -> None:
        times = submission.metrics.token_times
        for completion in submission.completions:
            self._enter(submission, completion)
            reason = completion.read()
            if completion.request.is_finished:
                self._close(completion)
            elif reason is not None:
                self.finish(completion, reason)
            if completion.index == 0:
                del times[completion.request.num_output_tokens :]
        if submission.error is not None:
            self.end(submission, submission.error)
        elif submission.finished:
            self.report(submission)

    def _enter(self, submission: Submission, completion: Completion) -> None:
        """Files a completion, none of its tokens read yet."""
        request = completion.request
        completion.output_text = submission.output_text(self._tokenizer)
        completion.num_read, completion.cumulative_logprob = 0, None
        completion.ends = submission.ends(self._eos_ids)
        if completion.logprobs is not None:
            del completion.logprobs[request.num_output_tokens :]
        self.owners[request] = (submission, completion)
        self.rows[request] = row = submission.sample_row(request, self._eos_ids)
        request.needs_tokens = row.needs_tokens

    def drop(self, submission: Submission) -> None:
        """Aborts a submission; one that is not live is ignored, even if another one has its id."""
        if self.live.get(submission.request_id) is not submission:
            return
        submission.make_completions()  # one that waits for trials to end may have none yet
        for completion in submission.completions:
            if not completion.request.is_finished:
                self.finish(completion, FinishReason.ABORT)
        self.report(submission)

    def fail(self, submission: Submission, error: Exception) -> None:
        """Ends a submission that failed while it ran."""
        is_own = isinstance(error, RequestError) and error.field is not None  # no fault of ours to be looked into
        logger.warning("request %s failed: %s", submission.request_id, error, exc_info=None if is_own else error)
        self.end(submission, as_request_error(error))

    def end(self, submission: Submission, error: QKVError) -> None:
        """Ends a submission with ``error``."""
        submission.error = error
        requests = [completion.request for completion in submission.completions]
        began = any(self._scheduler.requests.get(request.request_id) is request for request in requests)
        for completion in submission.completions:
            if not completion.request.is_finished:
                self.finish(completion, FinishReason.ERROR, error)
        self.counters.num_failed += began
        self.report(submission)

    def finish(self, completion: Completion, reason: FinishReason, error: QKVError | None = None) -> None:
        """Ends a completion's request."""
        request = completion.request
        if self._scheduler.requests.get(request.request_id) is request:
            self.note_usage(completion)
            self._scheduler.finish(request, reason, error=error)
        else:  # never came as far as the scheduler
            request.error, request.finish_reason = error, reason
            request.status = FINISHED
        self._close(completion)

    def note_usage(self, completion: Completion) -> None:
        """Remembers the rungs of a request's blocks, while it has some."""
        if completion.request.request_id in self.space.tables:
            completion.kv = self.space.usage(completion.request)

    def _close(self, completion: Completion) -> None:
        """Drops the state of an ended request; text that was held back is output now."""
        self.owners.pop(completion.request, None)
        self.rows.pop(completion.request, None)
        self.suspects.discard(completion.request)
        if completion.output_text is not None and completion.request.error is None:
            completion.output_text.finish()

    def report(self, *submissions: Submission) -> None:
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
