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
    from .crew import Crew


class LedSteps:
    """Steps that all ranks carry out."""

    def __init__(self, crew: Crew, own: Steps):
        self._crew, self._own = crew, own

    def execute(self, command: StepCommand) -> Computed:
        """See ``Steps``."""
        return self._crew.lead(command, lambda: self._own.execute(command))


class LedMover:
    """Moves that all ranks carry out. Values that are not finite are noticed in the KV heads of rank 0 alone."""

    def __init__(self, crew: Crew, own: MoveBackend):
        self._crew, self._own = crew, own

    def execute(self, command: MoveCommand) -> list[RowsCopy]:
        """See ``MoveBackend``."""
        return self._crew.lead(command, lambda: self._own.execute(command))
