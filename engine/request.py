"""What a caller hands in and gets back: sampling parameters, request outputs, and the live request itself.

Field names and defaults are vLLM's. No torch here: the scheduler works on these objects alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from qkv_engine.errors import QKVError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled and when it stops; ``validate`` in ``engine/validation.py`` checks the bounds.

    Differs from vLLM in one default: ``max_tokens=None`` generates to the end of the context instead of 16 tokens.
    ``seed=None`` draws a seed at submit. Tokens of a seeded request never depend on its neighbours.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 mean no limit
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
    bad_words: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    kv_floor: str | None = None  # narrowest rung this request's KV may step down to; None: the ladder's last
    kv_pinned: bool = False  # its KV never steps down
    tenant: str = ""  # who pays for its memory: a tenant's own blocks step down before others'
    cache_salt: str = ""  # requests share cached prefixes only under equal salts

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token under the model (before penalties and temperature); rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the ``n`` continuations of a prompt: ``text`` and ``token_ids`` so far, ``delta`` the new text."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    delta: str = ""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop token id or stop string; None for end of sequence

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times in seconds on the monotonic clock; ``None`` until the event has happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = []  # one per output token of the first completion
    num_preemptions: int = 0


class KVUsage(msgspec.Struct, frozen=True):
    """Where a request's KV stood when it ended: its blocks by rung, and the lowest code bits among them."""

    blocks: dict[str, int] = {}
    lowest_bits: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """State of one request; while it streams, each output adds ``delta`` to the one before."""

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

    @property
    def delta(self) -> str:
        """New text of the first completion since the previous output of the stream."""
        return self.outputs[0].delta

    @property
    def text(self) -> str:
        return self.outputs[0].text


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


@dataclass(slots=True, eq=False)
class Request:
    """One sequence the engine computes: a prompt, what was generated so far, and how far the KV cache has caught up.

    Owned by the scheduler from ``add`` to ``finish``. A prompt with ``n > 1`` becomes ``n`` requests. While a step runs
    its tokens count as computed, and the one it samples as a token, which is in flight until its value is known.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    arrival: int = 0  # serial number, first come first served
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)  # prompt, then output, as far as known
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)  # whose KV it may need: the last sampled token is never fed back
    num_tokens: int = field(init=False)  # with those in flight
    num_reserved_tokens: int = 0  # that its blocks have room for; kept by KV memory
    ages_at: int = 0  # computed tokens before which none of its blocks can be old enough to step down; kept alike
    files_at: int = 0  # computed tokens before which the prefix cache has nothing to file of it; kept alike
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of these, found in the prefix cache
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
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_in_flight(self) -> int:
        """Tokens that were sampled, or will be by steps under way, and are not known yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED
