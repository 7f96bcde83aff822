"""The engine's core, for one thread: schedule, run, turn tokens into text, stop, report.

A request that fails (bad logits, an error in its text, a step that only breaks with it) is ended with its error; the
others go on. Nothing here knows of threads; ``engine/serving/loop.py`` is the only caller.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest, Scheduler

from ..closable import Closable
from ..device.backend import Backend
from ..device.logprobs import TokenLogprobs
from ..device.runner import Pending, Runner, StepResult
from ..device.sampler import SampledToken
from ..errors import ConfigError, QKVError, RequestError
from ..kv.manager import KVManager
from ..kv.table_rows import TableLayout
from ..metrics import Counters
from ..request import FINISHED, SamplingParams
from ..sizes import format_size
from ..text.tokenizer import Tokenizer
from .basis_watch import BasisWatch
from .launched import Launched, NotLaunched, StepTimer
from .recovery import Recovery
from .registry import Registry
from .resizer import Resize, Resizer
from .sleeper import Sleeper
from .submission import Completion, Submission

logger = logging.getLogger("qkv_engine")

DISK_SECONDS = 0.005  # that a call from another thread waits for the disk at most
COPY_RATE = 40e9  # bytes a second to and from host memory beside a step: less than PCIe has, so that no step waits


class EngineCore:
    """Runs submissions to their end.

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
        basis_watch: BasisWatch | None = None,
        disk: Closable | None = None,
    ):
        """``make_space`` makes new books over the cache. ``basis_watch``: of KV in bases.

        ``disk``: that all books write to, closed with the core.
        """
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.eos_ids = eos_ids
        self.runs_ahead, self.basis_watch = runs_ahead, basis_watch
        self.registry = Registry(scheduler, tokenizer, eos_ids)
        self.recovery = Recovery(self.registry, scheduler, runner, make_space)
        self.resizer, self.sleeper = Resizer(runner, self._carry_out_moves), Sleeper()
        self._disk = disk
        self._waits_for_disk = False  # nothing is to be done before it has brought what somebody waits for
        self._in_flight: deque[Launched] = deque()
        self._timer = StepTimer(scheduler.pace)
        self.last_step: tuple[int | None, float] | None = None  # its single tokens, None with chunks, and seconds

    @property
    def space(self) -> KVManager:
        """See ``Registry.space``."""
        return self.registry.space

    @property
    def live(self) -> dict[str, Submission]:
        """Every submission that has not ended, by request id."""
        return self.registry.live

    @property
    def counters(self) -> Counters:
        """Of what came, how it ended, and the steps between."""
        return self.registry.counters

    @property
    def has_work(self) -> bool:
        if self.sleeper.is_asleep:
            return False
        busy = self.scheduler.has_work or bool(self._in_flight) or self.recovery.in_trials
        busy = busy or self.resizer.is_pending or self.sleeper.is_due or self.space.has_unsaved
        return busy or self.space.has_unwritten

    def add(self, submission: Submission) -> None:
        """Takes a submission in; an error goes to its stream alone. May be called again after an interrupt."""
        if submission.finished:
            return
        if self.live.setdefault(submission.request_id, submission) is not submission:
            error = RequestError("a live request has this id", field="request_id", value=submission.request_id)
            submission.stream.fail(error)
            return
        self._waits_for_disk = False
        self.counters.num_requests += not submission.completions
        if not self.recovery.in_trials:
            self.registry.begin(submission)

    def abort(self, request_id: str) -> None:
        """Ends a submission wherever it stands; an id that is not live is ignored."""
        submission = self.live.get(request_id)
        if submission is not None:
            self.drop(submission)

    def drop(self, submission: Submission) -> None:
        """Aborts a submission; one that is not live is ignored, even if another one has its id."""
        self.registry.drop(submission)

    def fail_all(self, error: QKVError) -> None:
        """Ends every live submission with ``error``, raised to its reader."""
        for submission in list(self.live.values()):
            submission.stream.fail(error)
        self.live.clear()
        self.resizer.end(error)
        self.sleeper.end(error)

    def resize(self, nbytes: int) -> Resize:
        """Has at most ``nbytes`` of KV memory held: more at once, less in the steps to come.

        Raises ``CapacityError``, which names the smallest size that requests allow, and changes nothing then;
        ``ConfigError`` while the engine sleeps.
        """
        if self.sleeper.is_asleep:
            raise ConfigError("the engine sleeps", field="size", value=format_size(nbytes), remedy="Wake it first")
        for submission in self.live.values():
            submission.make_completions()  # one that waits for trials to end may have none yet
        requests = [each.request for submission in self.live.values() for each in submission.completions]
        return self.resizer.begin(self.space, nbytes, [request for request in requests if not request.is_finished])

    def wake(self, backend: Backend, layout: TableLayout, basis_watch: BasisWatch | None) -> None:
        """Goes on with another ``backend`` over block tables of ``layout``, once KV memory is held again."""
        self.runner.begin(backend, layout)
        self.basis_watch, self.sleeper.is_asleep = basis_watch, False

    def reset_counters(self) -> None:
        """Starts counting anew; the peak of KV memory becomes the memory in use."""
        self.registry.counters = Counters()
        self.scheduler.num_preemptions = 0
        self.runner.cache.reset_counters()
        if self.space.prefix is not None:
            self.space.prefix.reset_counters()
            if self.space.prefix.host is not None:
                self.space.prefix.host.reset_counters()

    def free(self) -> None:
        """Lets go of the model and the KV memory; the core can do nothing after that."""
        self._in_flight.clear()
        if self._disk is not None:
            self._disk.close()
        del self.runner, self.scheduler, self.recovery, self.registry, self.basis_watch, self.resizer, self.sleeper

    def save_all(self, seconds: float) -> bool:
        """Has all that is cached idle written to files, as far as it comes in so many seconds; before ``free``.

        Returns whether nothing broke off, the steps under way included.
        """
        deadline = time.monotonic() + seconds
        try:
            while self._in_flight:
                self._collect(is_followed=len(self._in_flight) > 1)
            while self.space.has_unsaved and time.monotonic() < deadline:
                self.space.begin_step(None)
                self.space.write_ahead()
                self._carry_out_or_wait()
        except Exception as error:
            logger.warning("what is cached is not all saved: %s", error)
            return False
        return True

    def step(self) -> None:
        """Launches the next step, then waits for the steps under way: all, or all but the new one if it may run ahead.

        Among suspects no step runs ahead, so a step that breaks off is the last one and can be narrowed down.
        """
        self.last_step = None
        if self.sleeper.is_due and not self.recovery.in_trials:
            self._fall_asleep()
            return
        if self._waits_for_disk and not self.space.wait_for_disk(DISK_SECONDS):
            return
        self._waits_for_disk = False
        self.recovery.go_on_with_trials()
        num_followed = len(self._in_flight)  # steps under way that the next one builds on
        began_at = time.monotonic()
        self.scheduler.copy_nbytes = round(self._timer.seconds * COPY_RATE) if self.scheduler.running else None
        launched = self._launch(self.scheduler.schedule(), began_at)
        may_run_ahead = self.runs_ahead and launched and not self.registry.suspects
        while len(self._in_flight) > may_run_ahead:
            self._collect(is_followed=num_followed > 0)
            num_followed -= 1
        self.resizer.note(self.space)
        self.counters.num_preemptions = self.scheduler.num_preemptions
        if self.basis_watch is not None:
            self.basis_watch.look()

    def _fall_asleep(self) -> None:
        """Has all requests wait, moves what is cached to host memory, and gives model and KV memory back."""
        while self._in_flight:
            self._collect(is_followed=len(self._in_flight) > 1)
        self._carry_out_moves()  # blocks that a step ahead without work wanted fetched come before all leave
        self.scheduler.park_all()
        self.space.shrink()  # one under way is done, with nothing left in memory
        self._note_ended()
        self.resizer.note(self.space)
        self.basis_watch = None
        self.runner.put_away()
        self.sleeper.fell_asleep()

    def _launch(self, batch: ScheduledBatch, began_at: float) -> bool:
        """Launches ``batch`` after its moves; ``False`` if it is empty or cannot be launched.

        Copies to and from host memory do not wait for one that is not empty.
        """
        if not batch.items:
            if not self._in_flight:
                self._carry_out_or_wait()
            return False
        moves = self.runner.launch_moves()
        for request in batch.started:
            metrics = self.registry.owners[request][0].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = time.monotonic()
        pending: Pending | NotLaunched
        try:
            pending = self.runner.launch(batch, self.registry.rows)
        except Exception as error:
            pending = NotLaunched(error)
        self._in_flight.append(Launched(batch, moves, pending, began_at, self.space.num_commands))
        self.counters.num_steps += 1
        return not isinstance(pending, NotLaunched)

    def _carry_out_or_wait(self) -> None:
        """Carries out what stands in the books, for which no step comes; if there is nothing, waits for the disk.

        A read may wait for copies of earlier commands, so these are waited for even if others keep coming.
        """
        if self.resizer.is_pending or self.space.has_copies:
            self._carry_out_moves()
            if self.space.waits_for_disk or not self.scheduler.has_work:  # else copies pile up before who comes
                self.runner.check_device()
                self.space.ended(self.space.num_commands - 1)  # what the last one copies beside a step goes on
        elif self.space.waits_for_disk:
            self._note_ended()
            self._waits_for_disk = not self.space.wait_for_disk(DISK_SECONDS)

    def _note_ended(self) -> None:
        """Notes that the device is done with all that it was told: what is copied beside a step ends with a command."""
        if not self.sleeper.is_asleep:
            self._carry_out_moves()
            self.runner.check_device()
            self.space.ended(self.space.num_commands)

    def _carry_out_moves(self) -> None:
        """Carries out the moves that stand in the books, for which no step comes."""
        self.recovery.fail_holders(self.runner.launch_moves().wait())
        if not self._in_flight:  # else earlier commands may still tell of bad values
            self.space.confirm(self.space.num_commands)

    def _collect(self, is_followed: bool) -> None:
        """Waits for the oldest step under way, and accepts its results.

        A failed step is retried, except when the next one is already launched: its block tables have moved on.
        """
        step = self._in_flight.popleft()
        self.recovery.fail_holders(step.moves.wait())
        self.space.confirm(step.command)
        try:
            results = [step.pending.wait()]
        except Exception as error:
            if is_followed:
                raise  # everything starts over
            results = self.recovery.run_again(step.batch, error)
        else:
            self.space.ended(step.command - 1)  # the step waited for what was copied beside the one before
        self._accept_all(results)
        self.last_step = self._timer.note(step)

    def _accept_all(self, results: list[StepResult]) -> None:
        now, changed = time.monotonic(), dict[str, Submission]()
        for result in results:
            self._accept(result, now, changed)
        self.registry.report(*changed.values())

    def _accept(self, result: StepResult, now: float, changed: dict[str, Submission]) -> None:
        """Accepts the results of a step; notes in ``changed`` the submissions to report."""
        special = result.special
        for index, (item, token_id) in enumerate(zip(result.items, result.token_ids, strict=True)):
            request = item.request
            if request.status is FINISHED:
                continue  # it ended while the step ran
            submission, completion = self.registry.owners[request]
            try:
                if special and index in special:
                    self._accept_special(completion, special[index])
                self.scheduler.computed(item)
                if item.start < request.num_prompt_tokens:
                    self._accept_prompt(submission, completion, item, result.prompt_logprobs.get(index))
                if token_id is not None:
                    self._accept_token(submission, completion, token_id, now)
            except Exception as error:
                self.registry.fail(submission, error)
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
        # From here on the token counts: interrupted before, it is computed again; after, ``Registry.restore`` reads it.
        self.scheduler.append_token(completion.request, token_id)
        self.counters.generation_tokens += 1
        reason = completion.read_token(token_id)
        if reason is not None:
            self.registry.finish(completion, reason)

    def count_restarts(self) -> int:
        """Counts one more recovery; returns the most that any submission saw since it last gained a token."""
        return max([submission.note_restart() for submission in list(self.live.values())], default=0)

    def recover(self, isolate: bool = False) -> bool:
        """After an unforeseen error or interrupt: new books, an empty cache, every live request is recomputed.

        Needs nothing but the live requests, their tokens and times, and may itself be interrupted and called again.
        With ``isolate`` each submission then runs alone for some steps, and fails if steps break off with it alone.
        Returns whether such trials began or came further. The caller has checked that the device still computes.
        """
        self._in_flight.clear()
        return self.recovery.restart(isolate)

    def _texts_of(self, params: SamplingParams) -> Tokenizer | None:
        """The tokenizer, where tokens are to have a text."""
        return self.tokenizer if params.detokenize else None
