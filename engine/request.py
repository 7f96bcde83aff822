"""Requests: sampling parameters, request outputs, and the live request itself.

Field names are vLLM's where both have a field. No torch here: the scheduler works on these objects alone.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .metrics import RequestMetrics

if TYPE_CHECKING:
    from .errors import QKVError


class RequestOutputKind(enum.StrEnum):
    """Outputs of a stream: whole ones, new parts, or the finished request alone."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"

    def __repr__(self) -> str:
        return repr(str(self))


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an output must have, by one of the fields; named as vLLM's. Needs the extra ``structured``.

    Reasoning that the model marks is free, and comes before.

    Fields
        json: JSON schema that it meets, as a dict or as text.
        json_object: it is a JSON object.
        regex: regular expression, in Rust's syntax, that matches the whole of it.
        choice: it is one of these strings, at most 256.
        grammar: Lark grammar that derives it, in llguidance's dialect.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling, stopping and output options of one request. Checked when it is submitted.

    Names are vLLM's where both have a field; defaults and bounds may differ: ``max_tokens`` is None, not 16.

    Sampling
        n: completions of the prompt, 1 to 64.
        temperature: 0 (greedy) to 100.
        top_p: share of probability that stays, in (0, 1].
        top_k: tokens that stay; 0 and -1 for all.
        min_p: least probability that stays, as a share of the likeliest token's, in [0, 1].
        repetition_penalty: divides the logits of tokens in prompt and output, in [0.01, 100]; 1 for none.
        presence_penalty, frequency_penalty: taken off the logits of output tokens, once or as often as they
            occurred, in [-2, 2].
        seed: of the random numbers; None draws one. Random numbers do not depend on other requests, but logits do
            in their last bits: with 16-bit KV a seeded request may differ in a crowd.
        logit_bias: added to the logits of up to 1,024 token ids, each in [-100, 100].
        allowed_token_ids: the only tokens that may be sampled; None for all.
        allowed_tokens: a function that names the only tokens that may come next, or None for all. It gets a list of the
            output's token ids so far, in the engine's thread: all requests wait for it, it may be called again with the
            same ids, and must not call the engine. The next step waits for this request's tokens, as with
            ``structured_outputs``. An error in it ends the request.
        bad_words: strings that are never completed, at most 256.
        no_repeat_ngram_size: tokens of a run that may not occur twice in prompt and output together, up to 64; 0 for no
            such rule.
        structured_outputs: ``StructuredOutputs``, such as a JSON schema that the text meets; None for any text.

    When it stops
        max_tokens: output tokens; None for as many as the context holds.
        min_tokens: output tokens before which nothing but max_tokens ends it.
        stop: a string or up to 16 of them, of 1 to 256 characters each, that end the text. In conversations they are
            looked for in ``text`` alone: reasoning, and white space before the answer, do not count.
        stop_token_ids: up to 1,024 tokens that end it.
        ignore_eos: go on after the model's own end of sequence.
        include_stop_str_in_output: keep the stop string or token's text.

    Output
        logprobs: log-probabilities of each output token and of that many likeliest ones, 0 to 20.
        prompt_logprobs: the same of the prompt's tokens, 0 to 20.
        prompt_logprob_ids: for each prompt token up to 20 token ids whose log-probabilities in its place are wanted,
            too; needs ``prompt_logprobs``. None for no others.
        num_prefill_tokens: prompt tokens that are computed as a prompt; those after it are computed as if they had been
            generated, so that they attend to KV that has stepped down. None for all of the prompt.
        detokenize: make text of the tokens, those with log-probabilities included.
        skip_special_tokens: leave them out of the text.
        kept_token_ids: up to 1,024 special tokens that stay in the text all the same, such as the marks around a call;
            None for none.
        separate_reasoning: in conversations, put what the model marks as reasoning into ``reasoning`` and leave it
            out of ``text``; False gives one raw text, in all of which stop strings are looked for.
        output_kind: "cumulative" for outputs of a stream with all text and tokens so far, "delta" for outputs with new
            ones alone, whose cost does not grow with their number, "final_only" for one output, of the finished
            request; or a ``RequestOutputKind``.

    KV memory
        kv_floor: name of the narrowest rung its KV may step down to, such as "int8"; None for the ladder's last.
        kv_pinned: its KV never steps down.
        tenant: name of the customer it counts for; blocks of the tenant that needs room step down before others'. Who
            has a name leaves others one of eight requests that run at once.
        cache_salt: requests share cached prefixes only under equal salts.
        retain: time after its end, in seconds or as "10min" or "24h", up to 30 days, for which its cached blocks make
            room after those of others; None for none. At most half of KV memory is retained, and a tenant's share.
        session: name of the conversation that it belongs to, which ``Engine.done`` ends; "" for none.

    Order
        priority: an integer; requests with lower numbers are admitted and computed first, and others give way to them
            when memory runs out. Of equal ones that of the tenant with the fewest running starts next, of these
            the one that came first.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    allowed_tokens: Callable[[list[int]], Collection[int] | None] | None = None
    bad_words: list[str] | None = None
    no_repeat_ngram_size: int = 0
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_ids: list[list[int]] | None = None
    num_prefill_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    kept_token_ids: list[int] | None = None
    separate_reasoning: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    kv_floor: str | None = None
    kv_pinned: bool = False
    tenant: str = ""
    cache_salt: str = ""
    retain: str | float | None = None
    session: str = ""
    priority: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token under the model, before penalties and temperature.

    Fields
        logprob: natural logarithm of the probability.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: text of the token; None without a tokenizer and with ``detokenize=False``.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True, gc=False):
    """One of the ``n`` continuations of a prompt so far.

    Of requests with ``output_kind`` "delta" text, reasoning, token ids and log-probabilities are the new ones alone.

    Fields
        index: number of the completion, from 0.
        text: all text so far, without the reasoning.
        token_ids: all output tokens so far, those of the reasoning included.
        delta: text since the previous output of the stream.
        delta_token_ids: output tokens since the previous output of the stream.
        reasoning: thinking that the model marked in a conversation, without the marks; None where there was none.
        reasoning_delta: reasoning since the previous output of the stream.
        num_reasoning_tokens: output tokens of all the reasoning so far, its marks included.
        cumulative_logprob: sum of the output tokens' log-probabilities; None unless ``logprobs`` were asked for.
        logprobs: for each output token a dict from token ids to ``Logprob``; None unless asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: stop token id or stop string that ended it; None for the model's end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    delta: str = ""
    delta_token_ids: list[int] = []
    reasoning: str | None = None
    reasoning_delta: str = ""
    num_reasoning_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class KVUsage(msgspec.Struct, frozen=True):
    """Precision of a request's KV blocks when it ended, and of those it found in the prefix cache when it began.

    Fields
        blocks: number of blocks of 128 tokens by final rung, such as {"dense16": 1, "int4": 3}; the sink, which stays
            at 16 bits, is not counted. Layers with a sliding window have blocks of their own, those in sight.
        lowest_bits: fewest bits a code of any of its tokens; None if nothing was computed.
        cached_tokens: number of tokens found in the prefix cache by their rung then, such as {"dense16": 32, "int4":
            512}; where layers have different windows, in those that see the most.
        stored_tokens: number of tokens that were read from the KV store for it.
        states: number of states by final format, such as {"float32": 40, "int16": 8}; of models with such layers.
    """

    blocks: dict[str, int] = {}
    lowest_bits: float | None = None
    cached_tokens: dict[str, int] = {}
    stored_tokens: int = 0
    states: dict[str, int] = {}


class RequestOutput(msgspec.Struct, kw_only=True, gc=False):
    """State of one request.

    ``text``, ``reasoning``, ``delta``, ``reasoning_delta``, ``token_ids`` and ``finish_reason`` are those of the first
    completion.

    Fields
        request_id: the caller's, or one made up.
        prompt: text of the prompt, a conversation as its template rendered it; None for token ids.
        prompt_token_ids: tokens of the prompt.
        outputs: one ``CompletionOutput`` for each of the ``n`` completions.
        finished: nothing more will come.
        metrics: ``RequestMetrics``.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
        prompt_logprobs: for each prompt token but the first a dict from token ids to ``Logprob``; None unless asked.
        kv: ``KVUsage``, once it has finished.
        error: why it ended with ``finish_reason`` "error".
        error_field: parameter at fault, such as "structured_outputs" for a grammar beyond the library's limits; None
            where the error is not the request's own.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv: KVUsage = KVUsage()
    error: str | None = None
    error_field: str | None = None

    @property
    def delta(self) -> str:
        """New text of the first completion since the previous output of the stream."""
        return self.outputs[0].delta

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def reasoning(self) -> str | None:
        return self.outputs[0].reasoning

    @property
    def reasoning_delta(self) -> str:
        """New reasoning of the first completion since the previous output of the stream."""
        return self.outputs[0].reasoning_delta

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    def __repr__(self) -> str:
        """One line: the whole text and all times would fill a screen."""
        num_tokens, state = sum(len(o.token_ids) for o in self.outputs), self.error or self.finish_reason or "running"
        text = f"{self.text[:60]}{'...' * (len(self.text) > 60)}"
        return f"<RequestOutput {self.request_id}: {num_tokens} tokens, {state}: {text!r}>"


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


FINISHED = RequestStatus.FINISHED  # Python takes longer to find a member of an enum than a step has for a request


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class PromptPiece(NamedTuple):
    """Tokens of a request whose KV is cached together: the prefix cache's keys of all up to them, and before them."""

    key: bytes
    parent: bytes
    tokens: array[int]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence the engine computes: its prompt, its output so far, and how far the KV cache has caught up.

    Owned by the scheduler from ``add`` to ``finish``. A prompt with ``n > 1`` becomes ``n`` requests. While a step runs
    its tokens count as computed, and the one it samples as a token, which is in flight until its value is known.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    floor: int = field(kw_only=True)  # the narrowest rung it allows, by its index
    arrival: int = 0  # serial number, given by the scheduler
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)  # prompt, then output, as far as known
    num_prompt_tokens: int = field(init=False)
    num_prefill_tokens: int = field(init=False)  # tokens computed before any of their KV is demoted by age
    max_num_tokens: int = field(init=False)  # tokens whose KV it may need: the last sampled one is never fed back
    num_tokens: int = field(init=False)  # known tokens and those in flight
    num_reserved_tokens: int = 0  # that its blocks have room for; kept by KV memory for the scheduler
    next_cacheable_at: int = 0  # computed tokens at which the prefix cache has a block to file; kept by KV memory, too
    next_checkpoint_at: int = sys.maxsize  # computed tokens at which a copy of its states is kept; by KV memory, too
    next_passed_at: int = sys.maxsize  # computed tokens at which blocks pass out of sight; kept by KV memory, too
    pieces: list[PromptPiece] = field(default_factory=list)  # the first ones, as far as asked for; by KV memory, too
    num_fetched_pieces: int = 0  # leading ones that came from the host while it waits; kept by KV memory, too
    num_read_pieces: int = 0  # leading ones that were looked for on the disk meanwhile
    num_stored_tokens: int = 0  # that were read from the disk for it
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # computed ones that were found in the prefix cache
    cached_tokens: dict[str, int] = field(default_factory=dict)  # the same by the rung that they stood on then
    found_tokens: dict[str, int] = field(default_factory=dict)  # those of its last start; kept by KV memory
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: QKVError | None = None
    num_preemptions: int = 0
    needs_tokens: bool = False  # none is sampled for it while one is in flight: the host looks at them first

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_prefill_tokens = self.params.num_prefill_tokens or self.num_prompt_tokens
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_in_flight(self) -> int:
        """Tokens that were sampled, or will be by steps under way, and are not known yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether a single token is left to compute, behind which another one may be sampled."""
        return self.num_tokens == self.num_computed_tokens + 1 and self.num_tokens <= self.max_num_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED
