"""The backend of all ranks under tensor parallelism: each command goes to the workers and to rank 0's own backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device.backend import Backend, Captured, StepLimits
from ..device.command import StepCommand
from ..device.logits import Computed
from ..device.pinned import RowsCopy
from ..device.sampler import SampledTokens
from ..kv.moves import MoveCommand
from .commands import Capture

if TYPE_CHECKING:
    from .worker_group import WorkerGroup


class AllRanks:
    """Leads ``workers``, and holds rank 0's ``own`` backend; see ``Backend``.

    Every call raises ``RankLostError`` once a worker ended or stood still.
    """

    def __init__(self, workers: WorkerGroup, own: Backend):
        self._workers, self.own = workers, own

    def step(self, command: StepCommand) -> Computed:
        """Has all ranks carry out a step."""
        return self._workers.lead(command, lambda: self.own.step(command))

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        """Has all ranks carry out moves. Values that are not finite are noticed in the KV heads of rank 0 alone."""
        return self._workers.lead(command, lambda: self.own.move(command))

    def wait(self, computed: Computed) -> SampledTokens:
        """Blocks until the tokens of a step are on the host, or a rank is lost."""
        with self._workers.waiting():
            found = self.own.wait(computed)
        self._workers.check()  # an exchange that was broken off gives any numbers
        return found

    def capture(self, limits: StepLimits) -> Captured | None:
        """Has all ranks capture the steps that ``limits`` allow; equal ranks find equal shapes in equal order."""
        return self._workers.lead(Capture(limits), lambda: self.own.capture(limits))

    def check(self) -> None:
        """Raises ``RankLostError`` if a worker ended or stood still, ``DeviceLostError`` if rank 0's device is lost."""
        self._workers.check()
        self.own.check()
