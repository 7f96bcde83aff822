"""Backends of rank 0 under tensor parallelism: each command goes to all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device.backend import Steps
from ..device.command import StepCommand
from ..device.logits import Computed
from ..device.mover import MoveBackend
from ..device.pinned import RowsCopy
from ..kv.moves import MoveCommand

if TYPE_CHECKING:
    from .worker_group import WorkerGroup


class LedSteps:
    """Steps that all ranks carry out."""

    def __init__(self, group: WorkerGroup, own: Steps):
        self._group, self._own = group, own

    def execute(self, command: StepCommand) -> Computed:
        """See ``Steps``."""
        return self._group.lead(command, lambda: self._own.execute(command))


class LedMover:
    """Moves that all ranks carry out. Values that are not finite are noticed in the KV heads of rank 0 alone."""

    def __init__(self, group: WorkerGroup, own: MoveBackend):
        self._group, self._own = group, own

    def execute(self, command: MoveCommand) -> list[RowsCopy]:
        """See ``MoveBackend``."""
        return self._group.lead(command, lambda: self._own.execute(command))
