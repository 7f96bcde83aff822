"""The digest of a checkpoint's every byte: what KV on disk was computed from, for good."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

from qkv_engine.model_files import open_inside

from .checkpoint import Checkpoint

_PIECE_NBYTES = 16 * 2**20  # read at a time; an interrupt waits for one, some 10 ms
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")  # the Hub names a large file in its cache by its SHA-256


def checkpoint_digest(folder: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """SHA-256 in hex over the names and digests of a checkpoint's safetensors files.

    Reads them whole, at some 2 GB/s, but for files in the Hub's cache, whose names there are their digests. Ends with
    ``CancelledError`` once it is ``stopped``. Raises ``ModelError`` for a checkpoint that cannot be read, ``OSError``.
    """
    with Checkpoint(folder) as checkpoint:
        names = sorted(checkpoint.file_names)
    whole = hashlib.sha256()
    for name in names:
        whole.update(f"{name} {_file_digest(folder, name, stopped)}\n".encode())
    return whole.hexdigest()


def _file_digest(folder: Path, name: str, stopped: Callable[[], bool]) -> str:
    path = (folder / name).resolve()
    if path.parent.name == "blobs" and _HUB_BLOB.fullmatch(path.name):
        return path.name
    digest, piece = hashlib.sha256(), bytearray(_PIECE_NBYTES)
    with open_inside(folder, name) as file:
        while number := file.readinto(piece):
            if stopped():
                raise CancelledError
            digest.update(memoryview(piece)[:number])
    return digest.hexdigest()
