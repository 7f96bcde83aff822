"""Conversations on disk: one JSON file, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from qkv_engine.errors import QKVError

_MAX_BYTES = 2**26  # of a file to load, hundreds of times the longest context; a larger one is not read


class SavedMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One message, in the form that chat templates take."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str | None = None


class SavedChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A saved conversation. A system prompt may also stand first among the messages."""

    version: Literal[1] = 1
    model: str | None = None
    system: str | None = None
    messages: list[SavedMessage]


def save_chat(path: Path, chat: SavedChat, *, replace: bool) -> None:
    """Write ``chat`` to ``path`` in one step, readable by its owner alone.

    A saved conversation in its place is only replaced if ``replace``, any other file never. Raises ``QKVError``.
    """
    text = msgspec.json.format(msgspec.json.encode(chat), indent=2) + b"\n"
    try:
        _check_place(path, replace)
        _write(path, text)
    except OSError as error:
        raise QKVError(f"{path} cannot be written: {error.strerror}") from error


def load_chat(path: Path) -> SavedChat:
    """The conversation in ``path``. Raises ``QKVError`` when there is none."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_BYTES):
            raise QKVError(f"{path} is not a saved conversation: no file, or far too large")
        chat = msgspec.json.decode(path.read_bytes(), type=SavedChat)
    except OSError as error:
        raise QKVError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise QKVError(f"{path} is not a saved conversation: {error}") from error
    return _with_system_apart(path, chat)


def _with_system_apart(path: Path, chat: SavedChat) -> SavedChat:
    """``chat`` with its system messages, which must come first, in their own field."""
    count = next((n for n, message in enumerate(chat.messages) if message.role != "system"), len(chat.messages))
    rest = chat.messages[count:]
    if any(message.role == "system" for message in rest):
        raise QKVError(f"{path} has a system message after the conversation has begun")
    texts = [chat.system, *(message.content for message in chat.messages[:count])]
    system = "\n\n".join(text for text in texts if text) or None
    return msgspec.structs.replace(chat, system=system, messages=rest)


def _check_place(path: Path, replace: bool) -> None:
    if path.is_dir():
        raise QKVError(f"{path} is a folder", remedy="Name a file")
    if not path.parent.is_dir():
        raise QKVError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.path.lexists(path):
        return
    try:
        load_chat(path)
    except QKVError as error:
        raise QKVError(f"{path} exists and is no saved conversation", remedy="Choose another name") from error
    if not replace:
        raise QKVError(f"{path} holds another conversation", remedy=f"/save! {path} replaces it")


def _write(path: Path, text: bytes) -> None:
    """``text`` under a name of its own first, so that ``path`` is never half written."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
