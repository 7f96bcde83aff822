"""Calls that a client sends back, as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..bodies import JsonObject


def for_template(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Messages with tool calls as templates expect them: arguments as objects, and "" where there is no content."""
    return [_with_calls(message) if isinstance(message.get("tool_calls"), list) else message for message in messages]


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
