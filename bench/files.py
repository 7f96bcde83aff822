"""Files that a run writes at its end: refused before it if they cannot be written, then written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from qkv_engine.errors import ConfigError


def write_file(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``: whole or not at all, safe against a crash. Raises ``OSError`` naming ``path``."""
    target = path.resolve()  # a link stays, what it names is replaced
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe cannot be replaced
        else:
            _replace(target, data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(target: Path, data: bytes) -> None:
    draft = _draft(target)
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def check_writable(path: Path, field: str) -> None:
    """Raises ``ConfigError`` naming the option ``field`` if ``write_file`` could not write ``path``."""
    remedy = "Name a file in a folder that can be written"
    target = path.resolve()
    if target.is_dir():
        raise ConfigError("is a folder", field=field, value=str(path), remedy=remedy)
    if not target.parent.is_dir():
        raise ConfigError("no such folder", field=field, value=str(path), remedy=remedy)
    if target.exists() and not os.access(target, os.W_OK):
        raise ConfigError("cannot be written", field=field, value=str(path), remedy=remedy)
    if target.exists() and not target.is_file():
        return  # a device or a pipe is written in place
    draft = _draft(target)
    try:  # some folders, such as /proc, say that they can be written and cannot
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", field=field, value=str(path), remedy=remedy
        ) from error


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")
