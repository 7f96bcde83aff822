"""Stand-ins around the engine's core in a simulation: a scheduler that reports, a made-up cache and runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qkv_engine.device.runner import StepResult
from qkv_engine.device.steady_batch import SteadyBatch
from qkv_engine.errors import CapacityError

from .broken import require
from .tier import draw_copy_nbytes
from .turns import check_turns

if TYPE_CHECKING:
    from .simulator import Simulation


def spy_scheduler(simulation: Simulation, base: Any) -> type:
    """The real scheduler class, whose calls are told to the simulation, which checks their results."""

    class SpyScheduler(base):  # type: ignore[misc]
        def schedule(self) -> Any:
            simulation.before_schedule()
            self.copy_nbytes = draw_copy_nbytes(simulation)
            limited = self.pace is not None and any(request.decodes for request in self.running)
            before = set(self.running)
            batch = super().schedule()
            require(not limited or batch.num_chunk_tokens <= self.pace.chunk_tokens, "chunks are over the limit")
            simulation.scheduled(batch)
            if self.takes_turns:
                check_turns(self, {item.request.params.tenant for item in batch.items if item.request not in before})
            return batch

        def _preempt(self, request: Any) -> None:
            simulation.space.check_preemption()
            super()._preempt(request)

        def computed(self, item: Any) -> None:
            super().computed(item)
            if not item.samples:
                simulation.event("computed", item.request.request_id, item.end)

        def append_token(self, request: Any, token_id: int) -> None:
            simulation.about_to_emit(request)
            super().append_token(request, token_id)
            simulation.emitted(request, token_id)

        def finish(self, request: Any, reason: Any, *, error: Any = None) -> None:
            tables = simulation.tables_of(request)
            super().finish(request, reason, error=error)
            simulation.ended(request, reason, tables)

    return SpyScheduler


@dataclass(frozen=True)
class Later:
    """A result that the device has computed already and the host learns when it waits."""

    result: Any
    error: Exception | None = None
    told: Callable[[], None] | None = None

    def wait(self) -> Any:
        if self.told is not None:
            self.told()
        if self.error is not None:
            raise self.error
        return self.result


class SimulatedCache:
    """The part of ``KVCache`` that the core uses. New books come with the new space."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation

    def reset(self) -> None:
        pass

    def launch_moves(self) -> Later:
        bad = self.simulation.apply_moves()
        return Later(bad, told=lambda: self.simulation.model.told(bad))


class SimulatedRunner:
    """The part of ``Runner`` that the core uses."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.cache = SimulatedCache(simulation)
        self._steady: SteadyBatch | None = None  # of the step launched last
        self._items: list[Any] = []  # items of that step

    def check_device(self) -> None:
        """Passes: the device is never lost."""

    def launch_moves(self) -> Later:
        return self.cache.launch_moves()

    def check_resize(self, nbytes: int) -> None:
        """Passes: the device finds out when memory is to be there."""

    def dig(self, hole: tuple[int, int]) -> None:
        """Has the device give memory, which it sometimes lacks."""
        simulation = self.simulation
        store = simulation.space.tables.store
        require(not store.waves and not store.holes and not store._fresh, "memory grows before what is noted is done")
        if simulation.rng.random() < simulation.options.faults:
            raise CapacityError("on purpose")
        simulation.device.dig(hole)

    def launch(self, batch: Any, rows: Mapping[Any, Any]) -> Later:
        for item in batch.items:
            assert rows[item.request].token_ids is item.request.token_ids
        steady, self._steady = self._steady, None  # no step follows one that breaks off here
        found, error = self.simulation.model.compute(batch)
        self._steady = self._follow(steady, batch, rows)
        token_ids = [token and token.token_id for _, token in found]
        special = {i: token for i, (_, token) in enumerate(found) if token is not None and token.error is not None}
        return Later(
            StepResult(batch.items, token_ids, special, {}),
            error,
            told=None if error is None else self.simulation.model.run_again,
        )

    def _follow(self, steady: SteadyBatch | None, batch: Any, rows: Mapping[Any, Any]) -> SteadyBatch:
        """The steady batch of this step; one that continues must equal one made anew."""
        before, self._items = self._items, batch.items
        made = SteadyBatch(batch.items, rows)
        if steady is None or not steady.continues(batch.items):
            return made
        for old, new in zip(before, batch.items, strict=True):
            require(old.samples and new.samples and new.num_tokens == 1, "a step goes on with other tokens")
        require(_values(steady) == _values(made), "a step goes on with others")
        return steady

    def run(self, batch: Any, rows: Mapping[Any, Any]) -> StepResult:
        found: StepResult = self.launch(batch, rows).wait()
        return found


def _values(batch: SteadyBatch) -> dict[str, Any]:
    """What a batch is made of. A request that started over has a row of its own that is like the one before."""
    rows = [(row.params, row.token_ids, row.settings, row.penalties) for row in batch.states]
    return {**vars(batch), "states": rows}
