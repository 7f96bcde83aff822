"""Rows of checkpoint tensors into the parameters of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError

from .checkpoint import Checkpoint
from .layers import CheckpointRows

Targets = Iterable[tuple[str, CheckpointRows]]  # under the tensors' full names


def full_name(path: str, name: str) -> str:
    """The name of a tensor or module that is ``name`` below the parent of the module at ``path``."""
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name


def rows_nbytes(checkpoint: Checkpoint, targets: Targets) -> int:
    """Bytes that ``fill_rows`` reads."""
    stored = checkpoint.tensors
    return sum(stored[name].nbytes * part.num_rows // stored[name].num_rows for name, part in targets)


def fill_rows(
    checkpoint: Checkpoint, targets: Targets, advance: Callable[[int], None], stopped: Callable[[], bool]
) -> None:
    """Fills the rows from the checkpoint. ``advance`` is told how many bytes have been read."""
    for name, part in targets:
        for start, end, piece in checkpoint.pieces(name, part.first_row, part.num_rows):
            if stopped():
                raise CancelledError
            part.fill(start, end, piece)
            advance(piece.nbytes)
