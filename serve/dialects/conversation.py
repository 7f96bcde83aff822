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
        self._messages: list[JsonObject] = []
        self._texts: dict[str, list[str]] = {}  # of the last message if it is the assistant's, by field

    @property
    def messages(self) -> list[JsonObject]:
        """The messages so far."""
        self._join()
        return self._messages

    def add(self, role: str, text: str, **fields: str) -> None:
        """A message of somebody else, such as a tool."""
        self._join()
        self._messages.append({"role": role, "content": text, **fields})

    def think(self, text: str) -> None:
        """Reasoning of the assistant before what it says."""
        turn = self._turn()
        if "tool_calls" in turn or any(self._texts["content"]):
            self._begin()
        self._texts.setdefault("reasoning_content", []).append(text)

    def answer(self, text: str) -> None:
        """Text of the assistant."""
        self._turn()
        self._texts["content"].append(text)

    def call(self, call_id: str, name: str, arguments: str | JsonObject) -> None:
        """A call of a tool by the assistant."""
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _turn(self) -> JsonObject:
        """The assistant's message, a new one behind somebody else's."""
        if not self._texts:
            self._begin()
        return self._messages[-1]

    def _begin(self) -> None:
        self._join()
        self._messages.append({"role": "assistant", "content": ""})
        self._texts = {"content": []}

    def _join(self) -> None:
        """Ends the assistant's message; its texts are joined once, however many there are."""
        for field, texts in self._texts.items():
            self._messages[-1][field] = "\n".join(filter(None, texts))
        self._texts = {}


def with_system(text: str | None, messages: Sequence[JsonObject]) -> list[JsonObject]:
    """``messages`` behind a system's ``text``, in one message with those of the system that they begin with.

    Many templates take one such message alone, as the first.
    """
    number = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [text or "", *(message["content"] for message in messages[:number])]
    system = "\n\n".join(filter(None, texts))
    return [*([{"role": "system", "content": system}] if system else ()), *messages[number:]]


def function_tool(name: str, description: str | None, parameters: JsonObject | None, strict: bool | None) -> JsonObject:
    """A tool as chat completions and templates know it."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict or None}
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
