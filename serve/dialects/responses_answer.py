"""Answers of ``/v1/responses``: one response, or its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from qkv_engine import CompletionOutput, RequestOutput

from ..bodies import JsonObject
from ..errors import ApiError
from ..events import COMMENT, named_event
from ..tools.choice import ToolUse
from ..usage import kv_usage
from .answer_parts import AnswerPart, AnswerReader
from .responses_body import Asked, TextFormat

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}  # of the ids of items


class ResponsesAnswer:
    """The form of ``/v1/responses``. Each part of the answer is an item of the output."""

    closing = b""

    def __init__(
        self,
        asked: Asked,
        answer_id: str,
        model: str,
        tools: ToolUse,
        keep: Callable[[JsonObject, list[JsonObject]], None],
        *,
        is_stored: bool,
    ):
        """``keep`` is called with the response once it has ended, and with the answer as messages."""
        self._reader = AnswerReader(tools)
        self._base = _base(asked, answer_id, model, is_stored)
        self._keep, self._number = keep, 0
        self._open: AnswerPart | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        (output,) = outputs
        (completion,) = output.outputs
        self._reader.read(completion)
        return self._ended(outputs, len(completion.token_ids))

    def opening(self, number: int, output: RequestOutput) -> Iterable[bytes]:
        return self._first_events()

    def part(self, number: int, delta: CompletionOutput) -> Iterable[bytes]:
        events: list[bytes] = []
        for part, text in self._reader.read(delta):
            if part is not self._open:
                events += [*self._close("completed"), *self._begin(part)]
            events += self._delta(part, text) if text else []
        return events

    def ending(self, outputs: Sequence[RequestOutput], num_output: int) -> Iterable[bytes]:
        last = self._close("completed" if self._reader.finish_reason == "stop" else "incomplete")
        response = self._ended(outputs, num_output)
        return [*last, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> Iterable[bytes]:
        first = self._first_events() if not self._number else []
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        cause = {"code": code, "message": error.message, "param": error.param}
        response = self._response("failed", self._items("incomplete"), error=cause)
        return [*first, self._event("response.failed", response=response)]

    def pause(self) -> bytes:
        return COMMENT

    def _first_events(self) -> list[bytes]:
        begun = self._response("in_progress", [])
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def _begin(self, part: AnswerPart) -> list[bytes]:
        self._open = part
        added = self._event(
            "response.output_item.added", output_index=part.index, item=_item(part, "in_progress", None)
        )
        if part.kind == "call":
            return [added]
        return [added, self._of_part("content_part.added", part, part=_content(part, ""))]

    def _delta(self, part: AnswerPart, text: str) -> list[bytes]:
        if part.kind == "call":
            return [self._of_item("function_call_arguments.delta", part, delta=text)]
        if part.kind == "reasoning":
            return [self._of_part("reasoning_text.delta", part, delta=text)]
        return [self._of_part("output_text.delta", part, delta=text, logprobs=[])]

    def _close(self, status: str) -> list[bytes]:
        """The events that end the part before the next one, or before the end."""
        part, self._open = self._open, None
        if part is None:
            return []
        text = part.text
        if part.kind == "call":
            events = [self._of_item("function_call_arguments.done", part, name=part.name, arguments=text)]
        elif part.kind == "reasoning":
            events = [self._of_part("reasoning_text.done", part, text=text)]
        else:
            events = [self._of_part("output_text.done", part, text=text, logprobs=[])]
        if part.kind != "call":
            events.append(self._of_part("content_part.done", part, part=_content(part, text)))
        item = _item(part, status, text)
        return [*events, self._event("response.output_item.done", output_index=part.index, item=item)]

    def _ended(self, outputs: Sequence[RequestOutput], num_output: int) -> JsonObject:
        is_whole = self._reader.finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        usage = _usage(outputs, num_output, self._reader.num_reasoning_tokens)
        response = self._response(status, self._items(status), usage=usage)
        if is_whole:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(response, self._reader.message())
        return response

    def _items(self, last_status: str) -> list[JsonObject]:
        parts = self._reader.parts
        statuses = ["completed"] * (len(parts) - 1) + [last_status]
        return [_item(part, status, part.text) for part, status in zip(parts, statuses, strict=False)]

    def _response(self, status: str, items: list[JsonObject], **fields: Any) -> JsonObject:
        return {**self._base, "status": status, "output": items, **fields}

    def _of_part(self, kind: str, part: AnswerPart, /, **fields: Any) -> bytes:
        return self._of_item(kind, part, content_index=0, **fields)

    def _of_item(self, kind: str, part: AnswerPart, /, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", item_id=_id(part), output_index=part.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **fields})


def _id(part: AnswerPart) -> str:
    return f"{_PREFIXES[part.kind]}_{part.id}"


def _item(part: AnswerPart, status: str, text: str | None) -> JsonObject:
    """A part as an item of the output; without content while there is no ``text``."""
    content = [] if text is None else [_content(part, text)]
    if part.kind == "call":
        call = {"call_id": part.call_id, "name": part.name, "arguments": text or ""}
        return {"id": _id(part), "type": "function_call", "status": status, **call}
    if part.kind == "reasoning":
        return {"id": _id(part), "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": _id(part), "type": "message", "status": status, "role": "assistant", "content": content}


def _content(part: AnswerPart, text: str) -> JsonObject:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(outputs: Sequence[RequestOutput], num_output: int, num_reasoning: int) -> JsonObject:
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    kv = kv_usage(outputs)
    cached = {"cached_tokens": kv.num_cached, "cached_tokens_by_rung": kv.cached_by_rung, "cache_write_tokens": 0}
    return {
        "input_tokens": num_input,
        "input_tokens_details": cached,
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_input + num_output,
        "kv_bits": kv.bits,
        "kv_blocks": kv.blocks,
    }


def _base(asked: Asked, answer_id: str, model: str, is_stored: bool) -> JsonObject:
    """The fields of a response that are known before it is made: those of the body, as its client gave them."""
    body, reasoning = asked.body, asked.body.reasoning
    form: JsonObject = msgspec.to_builtins((body.text and body.text.format) or TextFormat())
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": body.tools or [],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {name: value for name, value in form.items() if value is not None}},
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "store": is_stored,
        "background": False,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
        "usage": None,
    }
