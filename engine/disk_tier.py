"""The KV store of an engine: whether it can have one, the namespace of its blocks, and the folder opened."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qkv_engine.models.checkpoint import weights_digest

from .config import EngineConfig
from .device.host_disk import HostDisk
from .errors import ConfigError
from .fingerprint import ModelFingerprint
from .kv_store.folder import OPTION, SIZE_OPTION
from .kv_store.namespace import Namespace
from .kv_store.store import KVStore
from .sizes import format_size, parse_size

if TYPE_CHECKING:
    import torch

    from qkv_engine.models.loader import LoadedModel

    from .device.host_memory import HostMemory
    from .device.layouts import Ladder

DEFAULT_SIZE: Final = "20GiB"
HOST_LIMIT: Final = 2**32  # bytes of host memory if none is asked for
HOST_SHARE: Final = 0.25  # of what is free there
BYTES_VERSION: Final = 1  # to be raised when a format's bytes get another meaning


def check_store(config: EngineConfig, ladder: Ladder) -> None:
    """Raises ``ConfigError`` for an engine that cannot keep its blocks in files."""
    if config.kv_store is None:
        return
    why = None
    if not ladder.spec.can_share:
        why, remedy = f"is for cached prefixes, and {ladder.name} caches none", "Leave kv_store or kv out"
    elif config.tensor_parallel > 1:
        why, remedy = "is of one rank", "Leave kv_store or tensor_parallel out"
    elif config.load_format == "random":
        why, remedy = "the model has random weights, which no name tells apart", "Leave kv_store or load_format out"
    if why is not None:
        raise ConfigError(why, field=OPTION, value=str(config.kv_store), remedy=remedy)


def default_host_nbytes(free: int, kv_nbytes: int) -> int:
    """Bytes of host memory for what is read and written, if none is asked for: as KV memory, within limits.

    ``free``: bytes of the host.
    """
    return max(1, min(kv_nbytes, HOST_LIMIT, int(HOST_SHARE * free)))


def make_namespace(config: EngineConfig, loaded: LoadedModel, ladder: Ladder, dtype: torch.dtype) -> Namespace:
    """What tells apart blocks of other models, formats and arithmetic."""
    assert loaded.folder is not None, "only random weights have no folder"
    model = ModelFingerprint.of(loaded.name, loaded.config, weights_digest(loaded.folder))
    kv = replace(config.kv, bases=None if config.kv.bases is None else replace(config.kv.bases, path=""))
    layouts = [[rung.layout for rung in group.rungs] for group in ladder.groups]
    parts = (BYTES_VERSION, str(dtype), kv, loaded.config, [group.layers for group in ladder.groups], layouts)
    layout = hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()
    return Namespace.of(model, ladder.spec, layout)


def open_disk(config: EngineConfig, namespace: Namespace, host: HostMemory) -> HostDisk:
    """The store of ``config`` behind ``host``. Raises ``ConfigError`` for a folder or a size that cannot be used."""
    assert config.kv_store is not None
    folder, size = Path(config.kv_store).expanduser(), config.kv_store_size or DEFAULT_SIZE
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    nbytes = parse_size(size, field=SIZE_OPTION, free=max(1, free))
    return HostDisk(KVStore(folder, nbytes, namespace, quota=config.kv_quota), host)


def describe(config: EngineConfig, disk: HostDisk) -> str:
    """The store in a line, for people."""
    stats = disk.stats()
    line = f"KV store {config.kv_store}: {stats.num_pieces:,} pieces of this model, {format_size(stats.nbytes)} "
    line += f"of {format_size(stats.max_nbytes)}"
    return line if stats.is_writable else f"{line}; only read: {stats.problem}"
