"""Safe reading of a model folder's files, which somebody hostile may have written.

Only regular files inside the folder are opened, once, and all reads use that one descriptor. Every file of
a model is read through this module: configurations, tokenizer, chat template, weights and their index.
"""

from __future__ import annotations

import json
import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from .errors import ModelError

# Bytes of the largest file of each name that is read, several times those of the largest released one.
MAX_BYTES = {
    "config.json": 2**20,
    "generation_config.json": 2**20,
    "tokenizer.json": 2**27,
    "tokenizer_config.json": 2**24,
    "chat_template.jinja": 2**20,
    "model.safetensors.index.json": 2**26,
}
MAX_JSON_DEPTH = 64  # levels of arrays and objects; deeper JSON is refused, real files have about ten

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# No-ops where the platform lacks them. O_NONBLOCK: opening a FIFO must not wait for its writer.
_OPEN_FLAGS = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
    _OPEN_FLAGS |= getattr(os, _flag, 0)


def open_inside(folder: Path, name: str) -> FileIO:
    """Open ``folder/name`` for reading, unbuffered.

    ``name`` is a plain file name. A symlink must stay inside the folder or, for a snapshot of the Hub's
    cache, inside that repository's cache folder. Raises ``ModelError``, naming the file, for anything but a
    regular file there.
    """
    check_file_name(name)
    path = os.path.realpath(folder / name)
    if not Path(path).is_relative_to(_declared_root(folder)):
        raise ModelError(f"{name} is a link that leaves the model folder {folder}")
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)  # opening a device may have effects
        if is_regular:
            # The descriptor gets its owner within one call of C, so that no interrupt comes between and loses it.
            file = next(map(FileIO, map(os.open, (path,), (_OPEN_FLAGS,))))
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # the file may have been exchanged in between
    except OSError as error:
        raise ModelError(f"{folder / name} cannot be opened: {error.strerror}") from error
    if not is_regular:
        raise ModelError(f"{folder / name} is not a regular file")
    return file


def check_file_name(name: object) -> None:
    """Raise ``ModelError`` unless ``name`` is a name without any path, on every operating system."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ModelError("is not a plain file name", field="file", value=name)


def has_file(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of that name, even one that ``open_inside`` would refuse."""
    return os.path.lexists(folder / name)


def file_names(folder: Path) -> list[str]:
    """Names of the folder's entries in order; none of a folder that cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read_file(folder: Path, name: str) -> bytearray:
    """All bytes of one file in ``MAX_BYTES``. Raises ``ModelError``, naming the file, also if it is too large."""
    with open_inside(folder, name) as file:
        nbytes, limit = os.fstat(file.fileno()).st_size, MAX_BYTES[name]
        if nbytes > limit:
            raise ModelError(f"{name} has {nbytes} bytes; at most {limit} are read")
        return read_exactly(file, 0, nbytes, name)


def read_text(folder: Path, name: str) -> str:
    """The UTF-8 text of one file in ``MAX_BYTES``. Raises ``ModelError``, naming the file."""
    return _decode(read_file(folder, name), name)


def read_json(folder: Path, name: str) -> Any:
    """The value of one JSON file in ``MAX_BYTES``, under ``parse_json``'s rules. Raises ``ModelError``."""
    return parse_json(read_file(folder, name), name)


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file that a model may lack; empty without the file. Raises ``ModelError``."""
    value = read_json(folder, name) if has_file(folder, name) else {}
    if not isinstance(value, dict):
        raise ModelError(f"{name} is not a JSON object")
    return value


def read_exactly(file: FileIO, offset: int, nbytes: int, name: str) -> bytearray:
    """``nbytes`` bytes of the file from byte ``offset`` on. Raises ``ModelError`` if the file ends first."""
    buffer = bytearray(nbytes)
    read_into(file, offset, memoryview(buffer), name)
    return buffer


def read_into(file: FileIO, offset: int, buffer: memoryview, name: str) -> None:
    """Fills ``buffer`` from byte ``offset``. Raises ``ModelError`` if the file ends first, as one that shrinks may."""
    done = 0
    try:
        file.seek(offset)
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                end, missing = offset + done, len(buffer) - done
                raise ModelError(f"{name} is truncated: it ends at byte {end}, {missing} too early")
            done += count
    except OSError as error:  # a broken disk, a network share that went away
        raise ModelError(f"{name} cannot be read: {error.strerror}") from error


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """Strict JSON: UTF-8, no repeated keys, no NaN or Infinity, no half characters, at most ``MAX_JSON_DEPTH`` levels.

    Raises ``ModelError`` that names ``where`` the data is from.
    """
    try:
        value = json.loads(_decode(data, where), object_pairs_hook=_unique, parse_constant=_refuse)
        if _ESCAPED_SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON: {str(error)[:200]}") from error
    if _is_deeper(value, MAX_JSON_DEPTH):
        raise ModelError(f"{where} is not valid JSON: more than {MAX_JSON_DEPTH} levels deep")
    return value


def _decode(data: bytes | bytearray, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error


def _declared_root(folder: Path) -> Path:
    """The folder that links may point into: ``folder``, or ``models--ORG--NAME`` in the Hub's cache for
    ``models--ORG--NAME/snapshots/COMMIT``.
    """
    root = folder.resolve()
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if is_snapshot else root


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
    return bool(level)


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is repeated")
    return values


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
