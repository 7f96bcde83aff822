"""What stands around the engine's core in a simulation: a scheduler that reports, and a cache and a runner made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qkv_engine.runner import StepResult

if TYPE_CHECKING:
    from .simulator import Simulation


def spy_scheduler(simulation: Simulation, base: Any) -> type:
    """The real scheduler class; each call is told to the simulation, which checks what came of it."""

    class SpyScheduler(base):  # type: ignore[misc]
        def schedule(self) -> Any:
            simulation.before_schedule()
            batch = super().schedule()
            simulation.scheduled(batch)
            return batch

        def computed(self, item: Any) -> None:
            super().computed(item)
            simulation.event("computed", item.request.request_id, item.end)

        def append_token(self, request: Any, token_id: int) -> None:
            simulation.may_break_off()
            super().append_token(request, token_id)
            simulation.emitted(request, token_id)

        def finish(self, request: Any, reason: Any, *, error: Any = None) -> None:
            blocks = simulation.blocks_of(request)
            super().finish(request, reason, error=error)
            simulation.ended(request, reason, blocks)

    return SpyScheduler


class SimulatedCache:
    """What the core asks of ``KVCache``. New books come with the new space."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation

    def reset(self) -> None:
        pass

    def apply_moves(self) -> set[Any]:
        return self.simulation.apply_moves()


class SimulatedRunner:
    """What the core asks of ``Runner``."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.cache = SimulatedCache(simulation)

    def run(self, batch: Any, rows: Mapping[Any, Any]) -> list[StepResult]:
        for item in batch.items:
            assert rows[item.request].token_ids is item.request.token_ids
        return [StepResult(item, token, None) for item, token in self.simulation.compute(batch)]
