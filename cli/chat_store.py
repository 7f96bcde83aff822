"""Conversations on disk: one JSON file, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from qkv_engine.errors import QKVError


class SavedMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One message, in the form that chat templates take."""

    role: Literal["user", "assistant"]
    content: str
    reasoning_content: str | None = None


class SavedChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What ``/save`` writes and ``/load`` reads."""

    version: Literal[1] = 1
    model: str | None = None
    system: str | None = None
    messages: list[SavedMessage]


def save_chat(path: Path, chat: SavedChat) -> None:
    """Replace ``path`` by ``chat`` in one step, readable by its owner alone."""
    text = msgspec.json.format(msgspec.json.encode(chat), indent=2) + b"\n"
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


def load_chat(path: Path) -> SavedChat:
    """The conversation in ``path``. Raises ``QKVError`` when the file holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedChat)
    except msgspec.DecodeError as error:
        raise QKVError(f"{path} is not a saved conversation: {error}") from error
