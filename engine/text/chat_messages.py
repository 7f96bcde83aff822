"""Checks of a conversation and of template arguments: plain JSON data of bounded depth and size, copied.

A chat template sees these copies alone, never a caller's object with methods of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import RequestError
from .special_marks import clean

MAX_DEPTH = 64  # levels of lists and dicts in one value
MAX_CHARS = 1 << 23  # of all messages, or of all template arguments; copying them takes about a second
VALUE_CHARS = 32  # that each value counts for, beside its own characters
RESERVED = ("messages", "self")  # variables that a caller may not set
THINKING_SWITCH = "enable_thinking"  # the variable by which Qwen3's template and others turn thinking off
TOOLS = "tools"  # the variable that templates show to models which call tools
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first two
_REMEDY = 'Use a list such as [{"role": "user", "content": "Hello"}]'

Rewrite = Callable[[str], str]


def check_messages(messages: object, rewrite: Rewrite = clean) -> list[dict[str, Any]]:
    """Plain copies of messages with a ``role`` and a ``content``: a string, or a list of text parts.

    An assistant's message may have tool calls, or another field, in place of a content. ``rewrite`` is applied to
    every string but those of assistants, which are trusted. As in transformers, a field that is ``None`` counts as
    missing, and reasoning is known under each of its names. Raises RequestError.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("must be a non-empty list", field="messages", value=messages, remedy=_REMEDY)
    copier = _Copier(rewrite)
    return [_check_message(message, f"messages[{i}]", copier) for i, message in enumerate(messages)]


def check_template_kwargs(template_kwargs: object) -> dict[str, Any]:
    """A plain copy of the variables a caller gives to a template: any identifiers but ``messages`` and ``self``.

    ``add_generation_prompt`` is a bool, ``tools`` and ``documents`` are lists of dicts. Raises RequestError.
    """
    field = "template_kwargs"
    if not isinstance(template_kwargs, Mapping):
        raise RequestError("must be a dict", field=field, value=template_kwargs)
    found: dict[str, Any] = _Copier(clean).copy(template_kwargs, field)
    for name, value in found.items():
        if not name.isidentifier() or name in RESERVED:
            remedy = f"Use an identifier other than {' and '.join(RESERVED)}"
            raise RequestError("is no name of a template variable", field=field, value=name, remedy=remedy)
        if name == "add_generation_prompt" and not isinstance(value, bool):
            raise RequestError("must be a bool", field=f"{field}.{name}", value=value)
        if name in ("tools", "documents") and not _is_list_of_dicts(value):
            remedy = "Give a tool as its JSON schema"
            raise RequestError("must be a list of dicts", field=f"{field}.{name}", value=value, remedy=remedy)
    return found


def _is_list_of_dicts(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _check_message(message: object, field: str, copier: _Copier) -> dict[str, Any]:
    role = copier.copy_role(message, field)
    plain: dict[str, Any] = copier.copy(message, field, is_trusted=role == "assistant")
    plain = {key: value for key, value in plain.items() if value is not None}
    content = plain.get("content")
    if content is None and not (role == "assistant" and len(plain) > 1):
        raise RequestError("is missing", field=f"{field}.content", value=content, remedy=_REMEDY)
    if content is not None:
        plain["content"] = _check_content(content, f"{field}.content")
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _check_content(content: object, field: str) -> str | list[dict[str, Any]]:
    """A string, or text parts, each as ``{"type": "text", "text": ...}``."""
    if isinstance(content, str):
        return content
    given: list[Any] = content if isinstance(content, list) else [None]
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in given]
    for number, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            remedy = "Send text parts alone"
            raise RequestError(f"{kind[:40]} is not supported", field=f"{field}[{number}]", remedy=remedy)
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RequestError("must be text", field=field, value=content, remedy="Use a string, or a list of text parts")
    return parts


class _Copier:
    """Copies values as plain JSON data and counts how much they are."""

    def __init__(self, rewrite: Rewrite):
        self._rewrite, self._left = rewrite, MAX_CHARS

    def copy_role(self, message: object, field: str) -> str:
        try:
            role = message.get("role") if isinstance(message, Mapping) else None
        except Exception as error:  # a mapping of the caller's own
            raise RequestError(f"cannot be read: {type(error).__name__}", field=field) from error
        if not isinstance(role, str) or not role:
            raise RequestError("must be a dict with a role", field=field, value=message, remedy=_REMEDY)
        return str.__str__(role)

    def copy(self, value: object, field: str, is_trusted: bool = False) -> Any:
        """A plain copy of ``value``, its strings rewritten unless ``is_trusted``. Raises RequestError."""
        rewrite = clean if is_trusted else self._rewrite
        try:
            return self._copy(value, field, rewrite, MAX_DEPTH)
        except RequestError:
            raise
        except Exception as error:  # raised by a mapping or sequence of the caller's own
            raise RequestError(f"cannot be read: {type(error).__name__}", field=field) from error

    def _copy(self, value: object, field: str, rewrite: Rewrite, depth: int) -> Any:
        self._spend(VALUE_CHARS, field)
        if isinstance(value, str):
            return rewrite(self._plain_text(value, field))
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._plain_number(value, field)
        if depth == 0:
            raise RequestError(f"is nested deeper than {MAX_DEPTH} levels", field=field)
        if isinstance(value, Mapping):
            items: Iterable[tuple[object, object]] = value.items()
            return {self._key(key, field): self._copy(item, field, rewrite, depth - 1) for key, item in items}
        if isinstance(value, list | tuple):
            return [self._copy(item, field, rewrite, depth - 1) for item in value]
        remedy = "Use strings, numbers, booleans, None, lists and dicts"
        raise RequestError("is not JSON data", field=field, value=value, remedy=remedy)

    def _key(self, key: object, field: str) -> str:
        if not isinstance(key, str):
            raise RequestError("a key must be a string", field=field, value=key)
        return clean(self._plain_text(key, field))

    def _plain_text(self, value: str, field: str) -> str:
        text = str.__str__(value)
        self._spend(len(text), field)
        return text

    def _plain_number(self, value: int | float, field: str) -> int | float:
        number = int.__int__(value) if isinstance(value, int) else float.__float__(value)
        if not -(2**63) <= number < 2**64:  # nor nan
            raise RequestError("is no number of 64 bits", field=field, value=value)
        return number

    def _spend(self, chars: int, field: str) -> None:
        self._left -= chars
        if self._left < 0:
            raise RequestError(f"the values have more than {MAX_CHARS} characters in all", field=field)
