"""The status of a measured row, and the words for failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from qkv_engine.errors import QKVError

OK, QUEUED, NO_FIT, FAILED = "ok", "queued", "does not fit", "failed"
FAILURES = (QKVError, RuntimeError, MemoryError)  # that a row reports; torch's out of memory is a RuntimeError


class HasStatus(Protocol):
    """A row with a status, and its cause where that is not "ok"."""

    @property
    def status(self) -> str: ...

    @property
    def detail(self) -> str | None: ...


def cause(error: BaseException, describe: Callable[[QKVError], str]) -> str:
    """The detail of a row that failed with ``error``; ``describe`` words the engine's own errors."""
    return describe(error) if isinstance(error, QKVError) else f"{type(error).__name__}: {error}"


def status_cell(row: HasStatus) -> str:
    """The status of a row; nothing for "ok"."""
    return "" if row.status == OK else row.status


def status_notes(rows: Sequence[HasStatus], names: Sequence[str]) -> list[str]:
    """The cause of every status but "ok", each once, behind the names of its rows."""
    causes: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        if row.status != OK:
            causes.setdefault(f"{row.status}: {row.detail}", []).append(name)
    return [f"{', '.join(names)} {cause}" for cause, names in causes.items()]
