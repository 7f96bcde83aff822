"""The routing key of a request: equal for requests whose prompts begin alike, so that one replica has their prefix."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec

PREFIX_CHARS = 1024  # of a plain prompt; prompts that differ later share a replica, and its copy of the prefix


class _Body(msgspec.Struct):
    """The fields of a body that say what its prompt begins with; everything else is the replica's to check."""

    prompt_cache_key: Any = None  # OpenAI's: the client's own word for "the same prefix"
    messages: Any = None
    prompt: Any = None
    input: Any = None  # a text or items, of /v1/responses
    instructions: Any = None
    system: Any = None  # of /v1/messages

    def opening(self) -> Any:
        """What the prompt begins with, which no later turn changes."""
        opening = _opening(self.messages) or _prefix(self.prompt) or _opening(self.input) or _prefix(self.input)
        system = [text for text in (self.instructions, self.system) if text is not None]
        return [*system, opening] if system and opening else opening


def routing_key(body: bytes, authorization: str) -> str:
    """The key of a JSON body from a caller with the header ``authorization``; "" where nothing can be shared.

    A conversation's key covers its messages up to the first of the user, which no later turn changes. Callers never
    share a prefix, so their keys differ. Invalid bodies have no key: any replica may refuse them.
    """
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    beginning = found.prompt_cache_key or found.opening()
    if not beginning:
        return ""
    return sha256(msgspec.json.encode([authorization, beginning])).hexdigest()


def _opening(messages: Any) -> list[Any]:
    """The messages up to the first one of the user."""
    if not isinstance(messages, list):
        return []
    for number, message in enumerate(messages, 1):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[:number]
    return messages


def _prefix(prompt: Any) -> Any:
    """The beginning of a text, of token ids, or of the first of several prompts."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return _prefix(prompt[0])
    return prompt[:PREFIX_CHARS] if isinstance(prompt, str | list) else None
