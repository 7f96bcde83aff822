"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Clients send earlier calls back, and these go to the chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from .bodies import JsonObject

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class _Call(msgspec.Struct):
    name: str
    arguments: JsonObject = {}


class ToolCallParser:
    """Takes tool calls out of a completion's text as it comes. A call that cannot be read stays text."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""  # text that may become a call

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[JsonObject]]:
        """The text that is certain to be no call, and the calls that are complete, after ``text`` more."""
        rest, shown, calls = self._held + text, "", list[JsonObject]()
        while True:
            before, opening, inside = rest.partition(OPENING)
            shown += before
            if not opening:
                break
            written, closing, after = inside.partition(CLOSING)
            if not closing:
                self._held = "" if is_last else opening + inside
                return (shown + opening + inside if is_last else shown), calls
            call = self._read(written)
            if call is None:
                shown += opening + written + closing
            else:
                calls.append(call)
                shown = shown.rstrip()
            rest = after.lstrip("\n")
        kept = 0 if is_last else _overlap(shown)
        self._held = shown[len(shown) - kept :]
        return shown[: len(shown) - kept], calls

    def _read(self, written: str) -> JsonObject | None:
        try:
            call = msgspec.json.decode(written.strip(), type=_Call)
        except (msgspec.DecodeError, RecursionError):
            return None
        arguments = msgspec.json.encode(call.arguments).decode()
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }


def for_template(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Messages with tool calls as templates expect them: arguments as objects, and "" where there is no content."""
    return [_with_calls(message) if isinstance(message.get("tool_calls"), list) else message for message in messages]


def writes_calls(chat_template: str | None) -> bool:
    """Whether a model whose template is this writes its calls in this form."""
    return chat_template is not None and OPENING in chat_template and CLOSING in chat_template


def _with_calls(message: JsonObject) -> JsonObject:
    calls = [_with_object(call) for call in message["tool_calls"]]
    return message | {"content": message.get("content") or "", "tool_calls": calls}


def _with_object(call: Any) -> Any:
    """``call`` with an object for arguments, where they are one as JSON."""
    try:
        arguments = msgspec.json.decode(call["function"]["arguments"] or "{}", type=JsonObject)
    except (KeyError, TypeError, msgspec.DecodeError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


def _overlap(text: str) -> int:
    """Characters at the end of ``text`` with which an opening mark may begin."""
    return next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)
