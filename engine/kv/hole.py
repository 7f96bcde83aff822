"""The hole of an arena: addresses between slabs and blocks that have no memory behind them. No torch."""

from __future__ import annotations


class Hole:
    """``number`` chunks without memory from the chunk ``first`` on, in ``range_nbytes`` of addresses.

    Memory is given and taken in chunks of ``chunk_nbytes``, counted from the first address. The first chunk stays: a
    kernel may look at address 0 where a table has no entry.
    """

    def __init__(self, range_nbytes: int, chunk_nbytes: int = 1):
        self.range_nbytes, self.chunk_nbytes = range_nbytes, chunk_nbytes
        self.first = self.number = 0

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of its first byte, and of the byte behind it."""
        return self.first * self.chunk_nbytes, (self.first + self.number) * self.chunk_nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory beside the hole."""
        return self.held_beside(self.number)

    def held_beside(self, number: int) -> int:
        """Bytes of memory beside ``number`` chunks."""
        return self.range_nbytes - number * self.chunk_nbytes

    def number_for(self, nbytes: int) -> int:
        """Chunks that must go for at most ``nbytes`` of memory to be held."""
        return max(0, -(-(self.range_nbytes - nbytes) // self.chunk_nbytes))

    def usable(self, number: int) -> int:
        """Bytes that slabs and blocks may take together beside ``number`` chunks, wherever the two meet chunks."""
        return self.range_nbytes - (number + (number > 0)) * self.chunk_nbytes

    def most_beside(self, nbytes: int) -> int:
        """The most chunks that leave ``nbytes`` usable."""
        return max(0, (self.range_nbytes - nbytes) // self.chunk_nbytes - 1)

    def place(self, number: int, slabs_end: int, blocks_start: int) -> None:
        """Makes it ``number`` chunks between two addresses, which leave room for it.

        It stays where it is while it can; else the free bytes are shared between both sides, so that it seldom moves.
        """
        least, most = max(1, -(-slabs_end // self.chunk_nbytes)), blocks_start // self.chunk_nbytes - number
        if number and not (self.number and least <= self.first <= most):
            self.first = (least + most) // 2
        self.number = number
        self.first *= number > 0
