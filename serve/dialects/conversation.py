"""Bodies and conversations of the dialects in the form of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..bodies import ChatBody, JsonObject
from ..errors import ApiError


class SharedFields(msgspec.Struct, kw_only=True):
    """Fields that mean the same in all dialects, the engine's own among them."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: JsonObject | None = None
    kv_floor: str | None = None
    kv_pinned: bool | None = None
    retain: str | float | None = None
    session: str | None = None

    def as_chat(self, messages: list[JsonObject], **own: Any) -> ChatBody:
        """The body of chat completions with these fields, ``messages`` and the dialect's ``own`` in its words."""
        shared = {name: getattr(self, name) for name in SharedFields.__struct_fields__}
        return ChatBody(messages=messages, **{**shared, **own})

    def template_variables(self, thinks: bool | None, effort: str | None) -> JsonObject:
        """Variables of the chat template: what the client names, beside the names that templates have for reasoning."""
        known: JsonObject = {} if thinks is None else {"enable_thinking": thinks}
        if effort is not None:
            known["reasoning_effort"] = effort
        return known | (self.chat_template_kwargs or {})


class Turns:
    """The messages of a conversation in the making. An assistant's text and the calls behind it are one message."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []

    def add(self, role: str, text: str, **fields: str) -> None:
        """A message of somebody else, such as a tool."""
        self.messages.append({"role": role, "content": text, **fields})

    def think(self, text: str) -> None:
        """Reasoning of the assistant before what it says."""
        turn = self._turn(is_new=self._has("content", "tool_calls"))
        turn["reasoning_content"] = _joined(turn.get("reasoning_content", ""), text)

    def answer(self, text: str) -> None:
        """Text of the assistant."""
        turn = self._turn()
        turn["content"] = _joined(turn["content"], text)

    def call(self, call_id: str, name: str, arguments: str | JsonObject) -> None:
        """A call of a tool by the assistant."""
        function = {"name": name, "arguments": arguments}
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _turn(self, *, is_new: bool = False) -> JsonObject:
        if is_new or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _has(self, *fields: str) -> bool:
        return bool(self.messages) and any(self.messages[-1].get(field) for field in fields)


def with_system(text: str | None, messages: Sequence[JsonObject]) -> list[JsonObject]:
    """``messages`` behind a system's ``text``, in one message with those of the system that they begin with.

    Many templates take one such message alone, as the first.
    """
    number = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [text or "", *(message["content"] for message in messages[:number])]
    system = "\n\n".join(filter(None, texts))
    return [*([{"role": "system", "content": system}] if system else ()), *messages[number:]]


def function_tool(name: str, description: str | None, parameters: JsonObject | None) -> JsonObject:
    """A tool as chat completions and templates know it."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def named_tool(name: str) -> JsonObject:
    """The choice of one tool, as chat completions name it."""
    return {"type": "function", "function": {"name": name}}


def unsupported(field: str, message: str) -> ApiError:
    """The error of a ``field`` that asks for what is not here; ``message`` says what to do instead."""
    return ApiError(400, message, param=field, code="unsupported_parameter")


def need(value: Any, field: str) -> Any:
    """``value``. Raises ``ApiError`` where there is none."""
    if value is None:
        raise ApiError(400, "is missing", param=field)
    return value


def _joined(first: str, second: str) -> str:
    return f"{first}\n{second}" if first and second else first or second
