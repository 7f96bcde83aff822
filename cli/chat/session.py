"""One conversation with an engine: history, parameters, and what each turn cost. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from qkv_engine.errors import CapacityError, QKVError, RequestError
from qkv_engine.sizes import format_size
from qkv_engine.text.chat_messages import THINKING_SWITCH

from ..text import sanitize

if TYPE_CHECKING:
    from qkv_engine import Engine, RequestOutput, SamplingParams
    from qkv_engine.request_stream import RequestStream
    from qkv_engine.text.tokenizer import Tokenizer

Message = dict[str, str]

_STATS_INTERVAL = 0.1  # seconds between two looks at the engine's counters while a reply streams


class Reply(Protocol):
    """Where a streamed reply goes. After ``start`` comes an ``end``, whatever happens in between."""

    def start(self) -> None: ...

    def think(self, text: str, num_tokens: int) -> None: ...

    def think_end(self, seconds: float, num_tokens: int) -> None: ...

    def answer(self, text: str) -> None: ...

    def end(self) -> None: ...


@dataclass
class Turn:
    """One question and its reply, with the figures of the status line."""

    question: str
    thinking: str = ""
    answer: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    kv_nbytes: int = 0
    kv_bits: float | None = None  # the lowest code bits any of its blocks reached
    finish_reason: str | None = None
    cut_off: str | None = None  # by which limit the reply ended before the model was done
    attempt: int = 0  # how often the question has been answered before
    interrupted: bool = False

    @property
    def context_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def status(self, max_model_len: int) -> str:
        """The figures of the turn in one line."""
        parts = ["stopped"] if self.interrupted else []
        if self.cut_off:
            parts.append(self.cut_off)
        if self.first_token_seconds is not None:
            parts.append(f"first token {self.first_token_seconds:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.1f} tok/s")
        parts.append(f"context {self.context_tokens:,} of {max_model_len:,}")
        bits = f" at {self.kv_bits:g} bits" if self.kv_bits is not None else ""
        parts.append(f"KV {format_size(self.kv_nbytes)}{bits}")
        return " · ".join(parts)

    def update(self, output: RequestOutput) -> None:
        """Take over the counts and times of the latest output."""
        completion, times = output.outputs[0], output.metrics
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_output_tokens = len(completion.token_ids)
        self.finish_reason, self.kv_bits = completion.finish_reason, output.kv.lowest_bits
        if times.first_token_time is None:
            return
        self.first_token_seconds = times.first_token_time - times.arrival_time
        last = times.finished_time or times.last_token_time
        if last is not None and last > times.first_token_time and self.num_output_tokens > 1:
            self.tokens_per_second = (self.num_output_tokens - 1) / (last - times.first_token_time)


@dataclass
class Conversation:
    """The messages so far, and the sampling parameters of the next turn."""

    engine: Engine
    params: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    last: Turn | None = None
    no_thinking: bool = False  # ask the model to answer at once, where its template can
    clock: Callable[[], float] = time.monotonic
    _unanswered: str | None = None  # the last question, while history has no reply to it

    @property
    def num_turns(self) -> int:
        """Questions in the history."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def can_skip_thinking(self) -> bool:
        """Whether the model's chat template has a switch for thinking."""
        return THINKING_SWITCH in (_tokenizer(self.engine).chat_template or "")

    def num_tokens(self, question: str = "") -> int:
        """Tokens of the prompt that the conversation makes, with ``question`` as its next message if there is one."""
        prompt = self._prompt(self.messages, question)
        return len(_tokenizer(self.engine).chat_prompt(prompt, self._template_kwargs or {})[1])

    def reset(self) -> None:
        """Forget what was said; the system prompt and the parameters stay."""
        self.messages, self.last, self._unanswered = [], None, None

    def undo(self) -> str:
        """Forget the last turn and return its question. Raises ``QKVError`` if there is none."""
        self.messages, question = self._before_last()
        self.last, self._unanswered = None, None
        return question

    def ask(self, question: str, reply: Reply) -> Turn:
        """Stream a reply to ``question`` and remember both. Ctrl-C ends it; what was said so far is kept."""
        self._unanswered = question
        return self._take_turn(Turn(question), self.messages, reply)

    def retry(self, reply: Reply) -> Turn:
        """Answer the last question again, in place of the first reply; a fixed seed is counted up for it.

        Raises ``QKVError`` if nothing has been asked.
        """
        history, question = self._before_last()
        attempt = self.last.attempt + 1 if self.last is not None and self.last.question == question else 1
        return self._take_turn(Turn(question, attempt=attempt), history, reply)

    def _take_turn(self, turn: Turn, history: list[Message], reply: Reply) -> Turn:
        prompt, params = self._prompt(history, turn.question), self._params(turn.attempt)
        try:
            with closing(self._stream(prompt, params)) as outputs:
                _Pump(self, turn, reply).run(outputs)
        except KeyboardInterrupt:
            turn.interrupted = True
        self.last = turn
        if turn.finish_reason == "length":
            turn.cut_off = _limit_met(turn, params, self.engine.max_model_len)
        if turn.answer or not turn.interrupted:
            self.messages, self._unanswered = [*history, _user(turn.question), _assistant(turn)], None
        return turn

    @property
    def _template_kwargs(self) -> dict[str, Any] | None:
        return {THINKING_SWITCH: False} if self.no_thinking else None

    def _prompt(self, history: list[Message], question: str) -> list[dict[str, Any]]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *history, *([_user(question)] if question else [])]

    def _stream(self, prompt: list[dict[str, Any]], params: SamplingParams) -> RequestStream:
        try:
            return self.engine.stream(prompt, params, template_kwargs=self._template_kwargs)
        except RequestError as error:
            full = _full(error, self.engine.max_model_len)
            if full is None or not self.messages:
                raise
            raise full from error

    def _params(self, attempt: int) -> SamplingParams:
        if not attempt or self.params.seed is None:
            return self.params
        return msgspec.structs.replace(self.params, seed=self.params.seed + attempt)

    def _before_last(self) -> tuple[list[Message], str]:
        """The history before the last turn, and that turn's question."""
        if self._unanswered is not None:
            return self.messages, self._unanswered
        for number in range(len(self.messages) - 1, -1, -1):
            if self.messages[number]["role"] == "user":
                return self.messages[:number], self.messages[number]["content"]
        raise QKVError("the conversation is empty")


class _Pump:
    """Moves one stream of outputs into a turn and its reply."""

    def __init__(self, conversation: Conversation, turn: Turn, reply: Reply):
        self._engine, self._clock = conversation.engine, conversation.clock
        self._turn, self._reply = turn, reply
        self._think_started: float | None = None
        self._think_tokens = 0
        self._next_look = 0.0

    def run(self, outputs: Iterable[RequestOutput]) -> None:
        """Pass on everything until the stream ends. Raises ``RequestError`` if the engine gives it up."""
        self._reply.start()
        try:
            self._take_all(outputs)
        finally:
            self._reply.end()

    def _take_all(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self._turn.update(output)
            self._look_at_memory()
            self._think(sanitize(output.reasoning_delta))
            self._answer(sanitize(output.delta))
            if output.finished:
                self._end_thinking()
            if output.error is not None:
                raise RequestError(output.error)

    def _think(self, text: str) -> None:
        if not text:
            return
        if self._think_started is None:
            self._think_started = self._clock()
        self._think_tokens = self._turn.num_output_tokens
        self._turn.thinking += text
        self._reply.think(text, self._think_tokens)

    def _answer(self, text: str) -> None:
        if text:
            self._end_thinking()
            self._turn.answer += text
            self._reply.answer(text)

    def _end_thinking(self) -> None:
        if self._think_started is not None:
            self._reply.think_end(self._clock() - self._think_started, self._think_tokens)
            self._think_started = None

    def _look_at_memory(self) -> None:
        """Note the most KV bytes seen: once the reply has ended its blocks are free again."""
        if self._clock() >= self._next_look:
            self._turn.kv_nbytes = max(self._turn.kv_nbytes, self._engine.stats().kv_bytes_used)
            self._next_look = self._clock() + _STATS_INTERVAL


def _limit_met(turn: Turn, params: SamplingParams, max_model_len: int) -> str:
    """The limit that ended a reply, and where in the reply it was met."""
    if params.max_tokens is not None and turn.num_output_tokens >= params.max_tokens:
        limit = f"cut off by max_tokens={params.max_tokens}"
    elif turn.context_tokens >= max_model_len:
        limit = f"cut off: the context is full ({max_model_len:,} tokens)"
    else:
        limit = "cut off: the KV memory is full"
    return f"{limit} while thinking" if turn.thinking and not turn.answer else limit


def _full(error: RequestError, max_model_len: int) -> RequestError | None:
    """``error`` as a chat means it, if the conversation has become too long for another turn."""
    if isinstance(error, CapacityError):
        return CapacityError("the KV memory is full", remedy="/reset, /undo, or start with more --kv-memory")
    if error.field == "max_model_len":
        remedy = "/reset, /undo, or start with --max-model-len N"
        return RequestError(f"the context is full ({max_model_len:,} tokens)", remedy=remedy)
    if error.field == "max_tokens":
        remedy = "/params max_tokens none, /reset, /undo, or start with --max-model-len N"
        return RequestError(f"the context ({max_model_len:,} tokens) has too little room left", remedy=remedy)
    return None


def _user(question: str) -> Message:
    return {"role": "user", "content": question}


def _assistant(turn: Turn) -> Message:
    """A reply as history: thinking stands in its own field, where only a template that asks for it looks."""
    message: Message = {"role": "assistant", "content": turn.answer.rstrip()}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking.strip()
    return message


def _tokenizer(engine: Engine) -> Tokenizer:
    assert engine.tokenizer is not None, "a model without a tokenizer takes no messages"
    return engine.tokenizer
