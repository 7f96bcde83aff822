"""Values that turn bad: known at once, or while nobody looks, until their block is sealed or who reads them fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulator import Simulation


def spoil_unseen(simulation: Simulation) -> None:
    """Has the values of a dense cached block turn bad now and then."""
    options, rng, device = simulation.options, simulation.rng, simulation.device
    if not options.unseen or rng.random() >= options.unseen:
        return
    places = simulation.space.cached.blocks()
    blocks = [block for block in places.values() if block.rung == 0 and not device.host.is_fetched(block.slot.address)]
    if blocks:
        block = rng.choice(blocks)
        device.spoil(block)
        simulation.model.unknown.add(block)
        simulation.counts["unseen"] += 1


def spoil_running(simulation: Simulation) -> set[Any]:
    """Has a block of a running request turn out bad now and then."""
    options, rng, device = simulation.options, simulation.rng, simulation.device
    if not simulation.scheduler.running or rng.random() >= options.bad_blocks:
        return set()
    request = rng.choice(list(simulation.scheduler.running))
    blocks = [b for table in simulation.tables_of(request) for b in table.blocks if device.path(b)]
    bad = {rng.choice(blocks)} if blocks else set()
    simulation.model.spoil(bad)
    return bad


def take_sealed_bad(simulation: Simulation) -> set[Any]:
    """Blocks that the moves of the last command found to be bad: those that were sealed."""
    found, simulation.device.sealed_bad = simulation.device.sealed_bad, set()
    return found if simulation.options.unseen else set()
