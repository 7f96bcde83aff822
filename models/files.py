"""Opening the files of a model folder, which may have been written by somebody hostile.

Only regular files inside the folder are opened, once, and what is read comes from that one descriptor.
"""

from __future__ import annotations

import json
import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from qkv_engine.errors import ModelError

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
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
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        raise ModelError(f"{folder / name} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{folder / name} is not a regular file")
    return FileIO(descriptor, "r", closefd=True)


def check_file_name(name: object) -> None:
    """Raise ``ModelError`` unless ``name`` is a name without any path, on every operating system."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ModelError("is not a plain file name", field="file", value=name)


def read_json(folder: Path, name: str, max_bytes: int) -> Any:
    """Parse one JSON file of the folder, with ``parse_json``'s rules; ``ModelError`` also if it is over
    ``max_bytes``.
    """
    with open_inside(folder, name) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > max_bytes:
            raise ModelError(f"{name} has {nbytes} bytes; at most {max_bytes} are read")
        return parse_json(read_exactly(file, 0, nbytes, name), name)


def read_exactly(file: FileIO, offset: int, nbytes: int, name: str) -> bytearray:
    buffer = bytearray(nbytes)
    read_into(file, offset, memoryview(buffer), name)
    return buffer


def read_into(file: FileIO, offset: int, buffer: memoryview, name: str) -> None:
    """Fill ``buffer`` from byte ``offset``; ``ModelError`` if the file ends first (it may shrink while it is
    read).
    """
    file.seek(offset)
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise ModelError(f"{name} is truncated: it ends at byte {offset + done}, in the middle of a tensor")
        done += count


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """Strict JSON: UTF-8, no repeated keys, no NaN or Infinity. ``ModelError`` names ``where`` it is from."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON: {str(error)[:200]}") from error


def _declared_root(folder: Path) -> Path:
    """What links may point into: the folder, or ``models--ORG--NAME`` for
    ``models--ORG--NAME/snapshots/COMMIT``.
    """
    root = folder.resolve()
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if is_snapshot else root


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is repeated")
    return values


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
