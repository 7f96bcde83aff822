"""Answers of ``/v1/messages``: one message, or its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from qkv_engine import CompletionOutput, RequestOutput

from ..bodies import JsonObject
from ..errors import ApiError
from ..events import COMMENT, named_event
from ..tools.choice import ToolUse
from ..usage import kv_usage
from .answer_parts import AnswerPart, AnswerReader
from .messages_body import AskedMessages

_DELTAS = {  # by kind: the type of what is new, and the field that has it
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesAnswer:
    """The form of ``/v1/messages``. Each part of the answer is a block of the content."""

    closing = b""

    def __init__(self, asked: AskedMessages, answer_id: str, model: str, tools: ToolUse, request_id: str):
        self._reader = AnswerReader(tools)
        self._base = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._max_tokens, self._request_id = asked.body.max_tokens, request_id
        self._open: AnswerPart | None = None
        self._has_begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        (output,) = outputs
        (completion,) = output.outputs
        self._reader.read(completion)
        number = len(completion.token_ids)
        content = [self._block(part, part.text) for part in self._reader.parts]
        return {**self._base, "content": content, **self._end(number), "usage": self._usage(outputs, number)}

    def opening(self, number: int, output: RequestOutput) -> Iterable[bytes]:
        self._has_begun = True
        usage = self._usage([output], sum(len(completion.token_ids) for completion in output.outputs))
        begun: JsonObject = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=begun)]

    def part(self, number: int, delta: CompletionOutput) -> Iterable[bytes]:
        events: list[bytes] = []
        for part, text in self._reader.read(delta):
            if part is not self._open:
                start = _event("content_block_start", index=part.index, content_block=self._block(part, None))
                events += [*self._close(), start]
                self._open = part
            kind, field = _DELTAS[part.kind]
            events.append(_delta(part, {"type": kind, field: text}))
        return events

    def ending(self, outputs: Sequence[RequestOutput], num_output: int) -> Iterable[bytes]:
        usage = self._usage(outputs, num_output)
        end = _event("message_delta", delta=self._end(num_output), usage=usage)
        return [*self._close(), end, _event("message_stop")]

    def failure(self, error: ApiError) -> Iterable[bytes]:
        return [named_event(error.in_messages(self._request_id))]

    def pause(self) -> bytes:
        return _event("ping") if self._has_begun else COMMENT

    def _close(self) -> list[bytes]:
        """The events that end the block before the next one, or before the end."""
        part, self._open = self._open, None
        if part is None:
            return []
        signed = [_delta(part, {"type": "signature_delta", "signature": self._signature})]
        return [*(signed if part.kind == "reasoning" else ()), _event("content_block_stop", index=part.index)]

    @property
    def _signature(self) -> str:
        """Of thinking: clients send none back without one. Nobody checks it here."""
        return self._base["id"]

    def _block(self, part: AnswerPart, text: str | None) -> JsonObject:
        """A part as a block of the content; without content while there is no ``text``."""
        if part.kind == "call":
            given = {} if text is None else _arguments(text)
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": text or "", "signature": "" if text is None else self._signature}
        return {"type": "text", "text": text or ""}

    def _end(self, num_output: int) -> JsonObject:
        """Why the answer ended."""
        stop = self._reader.stop_reason
        reason = "end_turn"
        if self._reader.has_called:
            reason = "tool_use"
        elif isinstance(stop, str):
            reason = "stop_sequence"
        elif self._reader.finish_reason == "length":
            reason = "max_tokens" if num_output >= self._max_tokens else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self, outputs: Sequence[RequestOutput], num_output: int) -> JsonObject:
        kv = kv_usage(outputs)
        return {
            "input_tokens": sum(len(output.prompt_token_ids) for output in outputs) - kv.num_cached,
            "cache_read_input_tokens": kv.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": num_output,
            "output_tokens_details": {"thinking_tokens": self._reader.num_reasoning_tokens},
            "kv_bits": kv.bits,
            "kv_blocks": kv.blocks,
        }


def _delta(part: AnswerPart, delta: JsonObject) -> bytes:
    return _event("content_block_delta", index=part.index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event({"type": kind, **fields})


def _arguments(text: str) -> JsonObject:
    """The arguments of a call as an object; empty where they broke off."""
    try:
        return msgspec.json.decode(text, type=JsonObject)
    except (msgspec.DecodeError, RecursionError):
        return {}
