"""Answers of ``/v1/completions`` and ``/v1/chat/completions``, whole or in chunks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from qkv_engine import CompletionOutput, RequestOutput
from qkv_engine.text.tokenizer import Tokenizer

from .bodies import ChatBody, CompletionBody, JsonObject
from .logprobs import chat_logprobs, completion_logprobs
from .tools.choice import ToolUse
from .tools.parser import CallDelta, ToolCallParser
from .usage import kv_usage


class Answer(Protocol):
    """The form of one request's answer. ``number`` is that of a prompt, from 0."""

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The answer in one piece."""
        ...

    def opening(self, number: int, output: RequestOutput) -> list[JsonObject]:
        """The choices that a prompt's chunks begin with."""
        ...

    def part(self, number: int, delta: CompletionOutput) -> JsonObject | None:
        """The choice for something new; None where the client would notice nothing."""
        ...

    def chunk(self, choices: Sequence[JsonObject]) -> JsonObject:
        """A chunk of a stream."""
        ...

    def usage(self, outputs: Sequence[RequestOutput], num_output: int) -> JsonObject:
        """Tokens of the request, ``num_output`` of them sampled, and the precision that its KV had come down to."""
        ...


class _Envelope:
    """What surrounds the choices of an answer."""

    kind = ""  # the word ``object`` of a whole answer
    chunk_kind = ""

    def __init__(self, answer_id: str, model: str, n: int | None):
        self._base = {"id": answer_id, "created": int(time.time()), "model": model}
        self._n = n or 1  # completions of a prompt

    def envelope(self, choices: Sequence[JsonObject], outputs: Sequence[RequestOutput]) -> JsonObject:
        num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return {**self._base, "object": self.kind, "choices": choices, "usage": self.usage(outputs, num_output)}

    def chunk(self, choices: Sequence[JsonObject]) -> JsonObject:
        return {**self._base, "object": self.chunk_kind, "choices": choices}

    def usage(self, outputs: Sequence[RequestOutput], num_output: int) -> JsonObject:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        kv = kv_usage(outputs)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": kv.num_cached,
                "cached_tokens_by_rung": kv.cached_by_rung,
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.num_reasoning_tokens for output in outputs for c in output.outputs)
            },
            "kv_bits": kv.bits,
            "kv_blocks": kv.blocks,
        }

    def index(self, number: int, completion: int) -> int:
        """The index of a choice among those of all prompts."""
        return number * self._n + completion


class ChatAnswer(_Envelope):
    """The form of ``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, answer_id: str, model: str, tokenizer: Tokenizer | None, tools: ToolUse):
        super().__init__(answer_id, model, body.n)
        self._num_top, self._with_ids = body.top_logprobs or 0, bool(body.return_token_ids)
        self._tokenizer, self._tools = tokenizer, tools
        self._parsers: dict[int, ToolCallParser | None] = {}  # by completion

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        choices = [self._message(completion) for completion in outputs[0].outputs]
        return self.envelope(choices, outputs)

    def opening(self, number: int, output: RequestOutput) -> list[JsonObject]:
        delta = {"role": "assistant", "content": ""}
        return [self._choice(c.index, {"delta": delta}, None, None, None) for c in output.outputs]

    def part(self, number: int, delta: CompletionOutput) -> JsonObject | None:
        text, calls = self._take_calls(delta)
        new = {"content": text, **_reasoning(delta), "tool_calls": [_call_delta(call) for call in calls]}
        new = {name: value for name, value in new.items() if value}
        if not new and delta.finish_reason is None and delta.logprobs is None and not self._with_ids:
            return None
        return self._with_delta(delta, {"delta": new})

    def _message(self, delta: CompletionOutput) -> JsonObject:
        text, calls = self._take_calls(delta)
        message: JsonObject = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if delta.reasoning:
            message |= _reasoning(delta)
        if calls:
            message["tool_calls"] = [_call(call.call_id, call.name, call.arguments) for call in calls]
        return self._with_delta(delta, {"message": message})

    def _take_calls(self, delta: CompletionOutput) -> tuple[str, list[CallDelta]]:
        """The text of ``delta`` without the tool calls in it, and what is new of these."""
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._tools.parser()
        parser = self._parsers[delta.index]
        if parser is None:
            return delta.text, []
        found = parser.push(delta.text, is_last=delta.finish_reason is not None)
        calls = [each for each in found if isinstance(each, CallDelta)]
        return "".join(each for each in found if isinstance(each, str)), calls

    def _with_delta(self, delta: CompletionOutput, content: JsonObject) -> JsonObject:
        logprobs = None
        if delta.logprobs is not None and self._tokenizer is not None:
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._num_top, self._tokenizer.token_bytes)
        if self._with_ids:
            content["token_ids"] = delta.token_ids
        parser = self._parsers.get(delta.index)
        has_called = parser is not None and parser.num_calls > 0 and delta.finish_reason == "stop"
        reason = "tool_calls" if has_called else delta.finish_reason
        return self._choice(delta.index, content, logprobs, reason, delta.stop_reason)

    def _choice(self, index: int, content: JsonObject, logprobs: Any, finish: str | None, stop: Any) -> JsonObject:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}


def _call(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_delta(delta: CallDelta) -> JsonObject:
    """What is new of a call: its first part names it."""
    if delta.name:
        return {"index": delta.number, **_call(delta.call_id, delta.name, delta.arguments)}
    return {"index": delta.number, "function": {"arguments": delta.arguments}}


def _reasoning(delta: CompletionOutput) -> JsonObject:
    """The reasoning by both its names: DeepSeek's, and the one that vLLM and others have now."""
    return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}


class CompletionAnswer(_Envelope):
    """The form of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionBody, answer_id: str, model: str, tokenizer: Tokenizer | None):
        super().__init__(answer_id, model, body.n)
        self._body, self._tokenizer = body, tokenizer
        self._num_chars: Counter[int] = Counter()  # sent so far, by index

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        choices = [
            self._choice(number, self._with_echo(output, self._cut(completion)))
            for number, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return self.envelope(choices, outputs)

    def opening(self, number: int, output: RequestOutput) -> list[JsonObject]:
        if not self._body.echo:
            return []
        return [self._choice(number, self._prompt(output, completion.index)) for completion in output.outputs]

    def part(self, number: int, delta: CompletionOutput) -> JsonObject | None:
        delta = self._cut(delta)
        has_news = delta.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids
        return self._choice(number, delta) if has_news else None

    def usage(self, outputs: Sequence[RequestOutput], num_output: int) -> JsonObject:
        return super().usage(outputs, 0 if self._body.echoes_alone else num_output)

    def _cut(self, delta: CompletionOutput) -> CompletionOutput:
        """``delta``, without the token that was sampled although only the prompt is wanted."""
        if not self._body.echoes_alone:
            return delta
        return replace(delta, text="", token_ids=[], logprobs=delta.logprobs and [])

    def _with_echo(self, output: RequestOutput, delta: CompletionOutput) -> CompletionOutput:
        if not self._body.echo:
            return delta
        prompt = self._prompt(output, delta.index)
        logprobs = None if prompt.logprobs is None else [*prompt.logprobs, *(delta.logprobs or ())]
        ids = prompt.token_ids + delta.token_ids
        return replace(delta, text=prompt.text + delta.text, token_ids=ids, logprobs=logprobs)

    def _prompt(self, output: RequestOutput, index: int) -> CompletionOutput:
        """The prompt as if completion ``index`` had begun with it."""
        ids, text = output.prompt_token_ids, output.prompt
        if text is None:
            text = "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)
        # A prompt's first token has no log-probabilities, unlike those of outputs.
        entries: Any = output.prompt_logprobs
        return CompletionOutput(index=index, text=text, token_ids=ids, logprobs=entries)

    def _choice(self, number: int, delta: CompletionOutput) -> JsonObject:
        index, logprobs = self.index(number, delta.index), None
        if delta.logprobs is not None:
            texts = None if self._tokenizer is None else self._tokenizer.token_text
            top, offset = self._body.logprobs or 0, self._num_chars[index]
            logprobs = completion_logprobs(delta.token_ids, delta.logprobs, top, offset, texts)
        self._num_chars[index] += len(delta.text)
        choice = {"index": index, "text": delta.text, "logprobs": logprobs}
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return choice | ({"token_ids": delta.token_ids} if self._body.return_token_ids else {})
