"""Equal places in a row, taken and given back. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Places:
    """Equal places in a row, numbered from an end of the arena; the lowest free one is taken first.

    ``extent``: places up to the last one that is taken. ``free``: those before it that are not.
    """

    def __init__(self) -> None:
        self.extent = 0
        self.free: set[int] = set()
        self._lowest: list[int] = []  # heap of ``free``, some out of date

    def take(self) -> int:
        """Takes a place."""
        number = self.lowest_free
        if number is None:
            self.extent += 1
            return self.extent - 1
        self.free.remove(number)
        return number

    @property
    def lowest_free(self) -> int | None:
        """The lowest free place before the extent, if there is one."""
        while self._lowest and self._lowest[0] not in self.free:
            heapq.heappop(self._lowest)
        return self._lowest[0] if self._lowest else None

    def last_taken(self) -> Iterator[int]:
        """Places that are taken, from the last one on."""
        return (number for number in range(self.extent - 1, -1, -1) if number not in self.free)

    def give(self, number: int) -> None:
        """Takes a place back."""
        self.free.add(number)
        heapq.heappush(self._lowest, number)
        while self.extent - 1 in self.free:
            self.extent -= 1
            self.free.remove(self.extent)
