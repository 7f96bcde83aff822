"""Changes of the size of KV memory, beside the steps of the engine's core."""

from __future__ import annotations

from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Protocol

from ..errors import QKVError
from ..kv.manager import KVManager
from ..kv.resize import check_size
from ..request import Request


class Memory(Protocol):
    """The device's side of KV memory, as far as a change of its size needs it; ``Runner`` implements it."""

    def check_resize(self, nbytes: int) -> None:
        """Raises ``QKVError`` if memory of the device cannot be resized, or lacks for ``nbytes`` of KV memory."""

    def dig(self, hole: tuple[int, int]) -> None:
        """Has the device's memory be where ``hole`` is not, at once. Raises ``CapacityError`` if it lacks some."""


class Resize:
    """A change of size under way; ``done`` has its end, or what keeps it from that, for any thread."""

    def __init__(self, capacities: tuple[int, ...]):
        """``capacities``: tokens of one request that fits alone from now on, by its floor."""
        self.capacities = capacities
        self.done: SimpleQueue[QKVError | None] = SimpleQueue()


class Resizer:
    """Has KV memory grow at once, and shrink a little in each step."""

    def __init__(self, runner: Memory, flush: Callable[[], None]):
        """``flush`` carries out the changes of bytes that stand in the books, and waits for them."""
        self._runner, self._flush = runner, flush
        self._under_way: Resize | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a shrink is under way."""
        return self._under_way is not None

    def begin(self, space: KVManager, nbytes: int, requests: Collection[Request]) -> Resize:
        """Begins to resize KV memory to at most ``nbytes``, instead of what was asked for before.

        ``requests``: all that live. Raises ``CapacityError``, and changes nothing, for a size that it cannot have now.
        """
        check_size(space, nbytes, requests)
        self._runner.check_resize(nbytes)
        arena = space.tables.arena
        if arena.hole.number_for(nbytes) < arena.hole.number:  # a chunk comes, which the device may lack
            self._flush()
            self._runner.dig(arena.hole_beside(nbytes))  # before the books count on it
        space.resize(nbytes)
        self.end(None)
        self._under_way = found = Resize(space.capacities)
        self.note(space)
        return found

    def note(self, space: KVManager) -> None:
        """Ends a shrink that has come to its goal, on the device, too."""
        if self._under_way is not None and not space.is_shrinking and not space.tables.store.holes:
            self.end(None)

    def end(self, error: QKVError | None) -> None:
        """Tells who waits that the shrink under way is over, or what keeps it from coming to an end."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.done.put(error)
