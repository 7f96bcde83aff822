"""Changes of the memory's size in a simulation: random ones, the smallest ones, and what must hold of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv_engine.errors import CapacityError

from .broken import require

if TYPE_CHECKING:
    from .simulator import Simulation


class Resizes:
    """Asks a simulation's core for other sizes of memory."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self._was_pending = False  # when it was checked last

    def ask(self, nbytes: int) -> None:
        """Asks for another size; if it is refused, half of the time for the smallest one that there may be."""
        before = self.simulation.space.size_asked
        if not self._resizes_to(nbytes):
            held = self.simulation.space.tables.arena.hole.held_nbytes + self.simulation.options.chunk_nbytes
            require(held > before, "a refused size changes the memory")
            if nbytes < before and self.simulation.rng.random() < 0.5:
                least = self.simulation.code.resize.smallest_nbytes(
                    self.simulation.space, self.simulation.scheduler.requests.values()
                )
                require(least > nbytes, "a size is refused that there may be")
                require(least >= before or self._resizes_to(least), "the smallest size is refused")
                smaller = self._resizes_to(least - self.simulation.options.chunk_nbytes)
                require(not smaller, "a smaller size than the smallest is taken")
        self.simulation.event("resize", nbytes, self.simulation.space.size_asked)

    def _resizes_to(self, nbytes: int) -> bool:
        asked = self.simulation.space.size_asked
        try:
            self.simulation.core.resize(nbytes)
        except CapacityError:
            return False
        self.simulation.space.size_asked = nbytes
        require(nbytes <= self.simulation.options.nbytes, "memory grows beyond its addresses")
        for request in self.simulation.scheduler.requests.values():
            require(
                request.max_num_tokens <= self.simulation.space.capacity_of(request.params),
                "a request never fits again",
            )
        self.simulation.counts["shrink"] += nbytes < asked
        self.simulation.counts["growth"] += nbytes > asked
        return True

    def check(self) -> None:
        """Checks that a change of size ends once the device has memory where the books say, and no sooner."""
        tables, is_pending = self.simulation.space.tables, self.simulation.core.resizer.is_pending
        noted = [self.simulation.device.hole, *tables.store.holes.values()][-1]
        require(is_pending or noted == tables.arena.hole.span, "the device has memory elsewhere")
        require(is_pending or not self.simulation.space.is_shrinking, "a shrink ends before its time")
        ends = self._was_pending and not is_pending
        require(not ends or not tables.store.holes, "a change of size ends before the device knows of it")
        self._was_pending = is_pending
