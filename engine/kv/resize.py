"""How small KV memory may become while requests run and wait. No torch."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import CapacityError
from ..request import Request
from ..sizes import format_least, format_size
from .manager import KVManager
from .slabs import least_with


def check_size(space: KVManager, nbytes: int, requests: Collection[Request]) -> None:
    """Raises ``CapacityError`` for a size that memory cannot have now, beside live ``requests``."""
    arena = space.tables.arena
    if nbytes > arena.range_nbytes:
        _refuse(nbytes, f"KV memory had {format_size(arena.range_nbytes)} at the start", "Give at most as much")
    if nbytes < arena.asked_nbytes and not _holds(space, nbytes, requests):
        least = format_least(smallest_nbytes(space, requests))
        _refuse(nbytes, f"what runs and waits could reach {least} now", f"Give at least {least}, or ask again later")


def smallest_nbytes(space: KVManager, requests: Collection[Request]) -> int:
    """The smallest size in which each of ``requests`` fits alone, and all that run together, on their floors."""
    hole = space.tables.arena.hole
    low, high = 0, hole.number_for(least_with(space.spec, space.tables.arena.slab_nbytes))
    while low < high:
        middle = (low + high + 1) // 2
        fits = _holds(space, hole.held_beside(middle), requests)
        low, high = (middle, high) if fits else (low, middle - 1)
    return min(hole.held_beside(low), space.tables.arena.asked_nbytes)


def _holds(space: KVManager, nbytes: int, requests: Collection[Request]) -> bool:
    """Whether admission's promises to ``requests``, to those that run and to one alone, hold in ``nbytes``."""
    tables, running = space.tables.renewed(nbytes), space.demand
    arena = tables.arena
    if arena.goal_nbytes < least_with(space.spec, arena.slab_nbytes):
        return False
    capacities = space.capacities_of(tables)
    if any(request.max_num_tokens > capacities[request.floor] for request in requests):
        return False
    slots = running.total.slots(space.num_rungs - 1)
    return len(running) < 2 or tables.fits_whatever_stepped_down(slots, running.total.floors())


def _refuse(nbytes: int, message: str, remedy: str) -> None:
    raise CapacityError(message, field="size", value=format_size(nbytes), remedy=remedy)
