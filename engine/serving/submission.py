"""Submissions: a caller's prompt, its completions so far, and the stream of their outputs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..device.logprobs import TokenLogprobs
from ..errors import QKVError, RequestError
from ..metrics import RequestMetrics
from ..request import (
    FINISHED,
    CompletionOutput,
    FinishReason,
    KVUsage,
    Logprob,
    Request,
    RequestOutput,
    RequestOutputKind,
    RequestStatus,
    SamplingParams,
)
from ..sampling.allowed_tokens import AllowedTokens
from ..sampling.guide import Guide
from ..sampling.ngrams import Ngrams
from ..sampling.sample_row import SampleRow
from ..text.reasoning import Marks, OutputText
from ..text.stop_strings import StopFinder
from ..text.text_stream import TextStream
from ..text.tokenizer import Tokenizer
from .report import CompletionReport, OutputLength, Report
from .stream import OutputStream

NO_USAGE = KVUsage()  # of a request that has not ended


@dataclass(slots=True, eq=False)
class Completion:
    """One of the ``n`` continuations of a submission, with the text of its tokens so far."""

    index: int
    request: Request
    logprobs: list[dict[int, Logprob]] | None
    ends: Mapping[int, int | None] = field(default_factory=dict)  # tokens that end it, and the ``stop_reason`` of each
    # State that follows from the request's tokens, rebuilt from them after an interrupt.
    output_text: OutputText | None = None  # None if no text is wanted
    num_read: int = 0  # output tokens that became text and were checked for stops
    cumulative_logprob: float | None = None
    kv: KVUsage = field(default_factory=KVUsage)

    def read(self) -> FinishReason | None:
        """Turns all tokens, none read before, into text; returns the reason to end if the last one ends the request."""
        reason = None
        for token_id in self.request.output_token_ids:
            reason = self.read_token(token_id)
        return reason

    def read_token(self, token_id: int) -> FinishReason | None:
        """Turns the next token into text; returns the reason to end if it ends the request."""
        request = self.request
        if self.logprobs is not None:
            logprob = self.logprobs[self.num_read][token_id].logprob
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprob
        self.num_read += 1
        is_end = token_id in self.ends and self.num_read >= request.params.min_tokens
        stopped = None if self.output_text is None else self._push(self.output_text, token_id, is_end)
        if is_end or stopped is not None:
            request.stop_reason = self.ends[token_id] if is_end else stopped
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_read >= request.max_tokens else None

    def _push(self, output_text: OutputText, token_id: int, is_end: bool) -> str | None:
        """Adds the text of a token; returns the stop string that it completes."""
        if not is_end or self.request.params.include_stop_str_in_output:
            output_text.push(token_id)
        return output_text.stopped

    def report(self) -> CompletionReport:
        request, output_text = self.request, self.output_text
        output = CompletionOutput(
            index=self.index,
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=None if request.finish_reason is None else str(request.finish_reason),
            stop_reason=request.stop_reason,
        )
        pieces, thoughts = list[str](), None
        if output_text is not None:
            pieces, thoughts = output_text.pieces, output_text.thoughts
            output.num_reasoning_tokens = output_text.num_reasoning_tokens
        length = OutputLength(request.num_output_tokens, len(pieces), len(thoughts or ()))
        return CompletionReport(output, request, self.logprobs, pieces, thoughts, length)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Submission:
    """A caller's submission: one prompt, ``n`` completions, and the stream their outputs go to."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    bad_word_ids: list[list[int]]
    incremental: bool  # report after every step, not only at the end
    floor: int = field(kw_only=True)  # the narrowest rung that ``params`` allow, by its index
    marks: Marks | None = None  # set if reasoning is kept apart from the answer
    guide: Guide | None = None  # of structured outputs
    chooser: AllowedTokens | None = None
    prompt_ngrams: Ngrams | None = None  # with ``no_repeat_ngram_size``
    stream: OutputStream = field(default_factory=OutputStream)
    completions: list[Completion] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: QKVError | None = None
    num_restarts: int = 0  # since it last gained a token
    restarted_at: int = -1  # tokens at the last restart

    @property
    def num_known_tokens(self) -> int:
        """Tokens of all completions, prompts and outputs."""
        own = sum([len(completion.request.token_ids) for completion in self.completions])
        return own or self.params.n * len(self.prompt_token_ids)

    def note_restart(self) -> int:
        """Counts one more recomputation; returns their number since the submission last gained a token.

        Nothing is counted while it waits: a request that does not run breaks no step.
        """
        known = self.num_known_tokens
        if not any(completion.request.status is RequestStatus.RUNNING for completion in self.completions):
            return 0
        self.num_restarts = self.num_restarts + 1 if known == self.restarted_at else 1
        self.restarted_at = known
        return self.num_restarts

    @property
    def finished(self) -> bool:
        if self.error is not None:
            return True
        for completion in self.completions:
            if completion.request.status is not FINISHED:
                return False
        return bool(self.completions)

    def note_time(self, index: int, now: float) -> None:
        """Notes that the next token of completion ``index`` came at ``now``."""
        metrics = self.metrics
        if index == 0:
            metrics.token_times.append(now)
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now

    def add_prompt_logprobs(self, start: int, found: list[TokenLogprobs], tokenizer: Tokenizer | None) -> None:
        """Adds a chunk's log-probabilities; positions that come again after a preemption are not added twice."""
        assert self.prompt_logprobs is not None
        for position, logprobs in enumerate(found, start + 1):
            if position == len(self.prompt_logprobs):
                self.prompt_logprobs.append(logprobs.entries(tokenizer))

    def output_text(self, tokenizer: Tokenizer | None) -> OutputText | None:
        """A new ``OutputText`` for a completion; None if no text is wanted."""
        params, prompt_ids = self.params, self.prompt_token_ids
        if tokenizer is None or not params.detokenize:
            return None

        def make() -> TextStream:
            return tokenizer.text_stream(params.skip_special_tokens, prompt_ids, params.kept_token_ids or ())

        stops = StopFinder(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        if self.marks is None:
            return OutputText(make, stops, min_tokens=params.min_tokens)
        return self.marks.output_text(make, stops, params.min_tokens)

    def sample_row(self, request: Request, eos_ids: Collection[int]) -> SampleRow:
        """The sampling state of a completion, for a model that ends sequences with ``eos_ids``."""
        stop_ids = [*eos_ids, *(self.params.stop_token_ids or ())]
        guide = None if self.guide is None else self.guide.begin(self.marks)
        return SampleRow(
            self.params,
            request.seed,
            request.token_ids,
            request.num_prompt_tokens,
            stop_ids,
            self.bad_word_ids,
            guide,
            self.chooser,
            self.prompt_ngrams,
        )

    def ends(self, eos_ids: Collection[int]) -> dict[int, int | None]:
        """Tokens that end a completion, and the ``stop_reason`` they give."""
        own = () if self.params.ignore_eos else eos_ids
        return {token_id: token_id for token_id in self.params.stop_token_ids or ()} | dict.fromkeys(own)

    def make_completions(self) -> None:
        """Makes the missing ones of the ``n`` completions."""
        params, completions = self.params, self.completions
        while len(completions) < params.n:
            index = len(completions)
            name = f"{self.request_id}/{index}" if params.n > 1 else self.request_id
            seed = self.seed + index
            request = Request(name, self.prompt_token_ids, params, self.max_tokens, floor=self.floor, seed=seed)
            completions.append(Completion(index, request, None if params.logprobs is None else []))
        if params.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = [None]

    def report(self, finished: bool) -> Report:
        """The state for the reader; ``finished``: it is the last one."""
        requests = [completion.request for completion in self.completions]
        completions = [completion.report() for completion in self.completions]
        self.metrics.num_preemptions = sum([request.num_preemptions for request in requests])
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.output for completion in completions],
            finished=finished,
            metrics=self.metrics,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=max([request.num_cached_tokens for request in requests], default=0),
            kv=self._usage() if finished else NO_USAGE,
            error=None if self.error is None else str(self.error),
            error_field=self.error.field if isinstance(self.error, RequestError) else None,
        )
        return Report(output, completions, self.params.output_kind is RequestOutputKind.DELTA)

    def _usage(self) -> KVUsage:
        """The rungs of the blocks of all completions when they ended, and what the one that found most had found."""
        kvs = [c.kv for c in self.completions]
        blocks: Counter[str] = Counter()
        for kv in kvs:
            blocks.update(kv.blocks)
        lowest = min([kv.lowest_bits for kv in kvs if kv.lowest_bits is not None], default=None)
        cached = max([kv.cached_tokens for kv in kvs], key=lambda tokens: sum(tokens.values()), default={})
        states = sum((Counter(kv.states) for kv in kvs), Counter[str]())
        return KVUsage(dict(blocks), lowest, cached, max([kv.stored_tokens for kv in kvs], default=0), dict(states))
