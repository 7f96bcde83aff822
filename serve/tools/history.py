"""Calls that a client sends back, as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..bodies import JsonObject
from ..fair_threads import FairThreads
from ..json_time import decoding_time


def for_template(messages: Sequence[JsonObject], threads: FairThreads) -> list[JsonObject]:
    """Messages with tool calls as templates expect them: arguments as objects, and "" where there is no content.

    Called in one of ``threads``. Raises ``ApiError`` for arguments that take too long to be decoded, all together.
    """
    if not any(map(_has_calls, messages)):
        return list(messages)

    def convert() -> list[JsonObject]:
        calls = [call for message in messages if _has_calls(message) for call in message["tool_calls"]]
        decoding_time(*(text.encode() for call in calls if (text := _arguments(call))))
        return [_with_objects(message) if _has_calls(message) else message for message in messages]

    return threads.alone(convert)


def _has_calls(message: JsonObject) -> bool:
    return isinstance(message.get("tool_calls"), list)


def _arguments(call: Any) -> str | None:
    """The arguments of a call as JSON; None where they are no text."""
    try:
        text = call["function"]["arguments"] or "{}"
    except (KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _with_objects(message: JsonObject) -> JsonObject:
    calls = [_with_object(call) for call in message["tool_calls"]]
    return message | {"content": message.get("content") or "", "tool_calls": calls}


def _with_object(call: Any) -> Any:
    """``call`` with an object for arguments, where they are one as JSON."""
    if (text := _arguments(call)) is None:
        return call
    try:
        arguments = msgspec.json.decode(text, type=JsonObject)
    except (msgspec.DecodeError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}
