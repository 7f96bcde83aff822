"""The prefix cache: full blocks of prompts and outputs, found again by a hash of all tokens so far. No torch.

A block is keyed by SHA-256 over (salt, model, ladder) and all tokens so far; tokens are compared on a hit, so that
even a collision cannot mix requests. A cached block may step down like any other; a hit then continues on the lower
precision, unless the request's floor forbids it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from .block import Block
from .table import BlockTables


@dataclass(slots=True, eq=False)
class Entry:
    """One cached block and its tokens, which follow those of ``parent``. ``used``: serial number of the last use."""

    key: bytes
    block: Block
    tokens: array[int]
    parent: bytes
    used: int

    @property
    def is_idle(self) -> bool:
        """Whether no request holds the block."""
        return self.block.refs == 1


class PrefixCache:
    """Finds, keeps and gives up shared blocks. Holds one reference on each; owned by the scheduler's thread."""

    def __init__(self, tables: BlockTables, model: str):
        self._tables = tables
        self._model = model
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[Block, Entry] = {}
        self._children: dict[bytes, int] = {}
        # Heaps of (used, key) of idle entries, some out of date: without a cached block that follows, and with one.
        self._leaves: list[tuple[int, bytes]] = []
        self._inner: list[tuple[int, bytes]] = []
        self._uses = count()
        tables.store.on_lone = self._note_lone
        self._published: dict[str, tuple[int, bytes]] = {}  # request -> blocks filed, key of the last
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, tokens: list[int], salt: str, floor: int, limit: int) -> list[Block]:
        """The blocks of the longest cached prefix of ``tokens`` within its first ``limit``, in token order.

        Blocks that are counted as dense for a request of ``tokens`` must still be dense.
        """
        self.num_queried_tokens += limit
        num_narrow = self._tables.spec.main.num_token_slots + self._tables.spec.main.split(len(tokens), floor)[1]
        key, found = self._root(salt), []
        for index in range(self._num_pieces(limit)):
            piece = tokens[self._piece(index)]
            key = _extend(key, piece)
            entry = self._entries.get(key)
            narrowest = floor if index < num_narrow else 0
            if entry is None or entry.tokens != array("q", piece) or entry.block.rung > narrowest:
                break
            entry.used = next(self._uses)
            self._note_idle(entry)
            found.append(entry.block)
            self.num_hit_tokens += len(piece)
        return found

    def publish(self, request_id: str, tokens: list[int], salt: str, num_computed: int) -> None:
        """Files the blocks of a request that are full and computed and not filed yet."""
        filed, key = self._published.get(request_id, (0, b""))
        num_pieces = self._num_pieces(num_computed)
        if filed >= num_pieces:
            return
        blocks, key = self._tables.main.entries(self._tables.main[request_id]), key or self._root(salt)
        for index in range(filed, num_pieces):
            piece = tokens[self._piece(index)]
            parent, key = key, _extend(key, piece)
            if key not in self._entries:
                blocks[index].refs += 1
                entry = Entry(key, blocks[index], array("q", piece), parent, next(self._uses))
                self._entries[key] = self._of_block[entry.block] = entry
                self._children[parent] = self._children.get(parent, 0) + 1
            self._published[request_id] = (index + 1, key)

    def next_end(self, num_computed: int) -> int:
        """Token count at which one more block is full than at ``num_computed``."""
        end: int = self._piece(self._num_pieces(num_computed)).stop
        return end

    def forget(self, request_id: str) -> None:
        """Drops the record of a request that gave its blocks back; the blocks that it filed stay."""
        self._published.pop(request_id, None)

    def evict(self) -> bool:
        """Gives up the least recently used block that no request holds, preferably one that no cached block follows."""
        while (entry := self._pop_idle(self._leaves)) is not None:
            if entry.key not in self._children:
                self._remove(entry)
                return True
            heappush(self._inner, (entry.used, entry.key))
        entry = self._pop_idle(self._inner)
        if entry is not None:  # a running request holds its successor, computed beside it and filed after it
            self._remove(entry)
        return entry is not None

    def purge(self, blocks: Iterable[Block]) -> None:
        """Takes out entries of blocks whose values are not trusted."""
        for entry in [self._of_block[block] for block in blocks if block in self._of_block]:
            self._remove(entry)

    @property
    def idle_nbytes(self) -> int:
        """Bytes of cached blocks that no request uses; they are given up first when memory runs short."""
        return sum(entry.block.slot.nbytes for entry in self._entries.values() if entry.is_idle)

    def clear(self) -> None:
        """Gives up everything; blocks that requests share stay theirs."""
        for entry in self._entries.values():
            self._tables.store.drop(entry.block)
        for book in (self._entries, self._of_block, self._children, self._leaves, self._inner):
            book.clear()
        self._published.clear()

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key], self._of_block[entry.block]
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            if entry.parent in self._entries:
                self._note_idle(self._entries[entry.parent])
        self._tables.store.drop(entry.block)

    def _note_lone(self, block: Block) -> None:
        """Files ``block`` as idle if its one remaining owner is the cache."""
        if block in self._of_block:
            self._note_idle(self._of_block[block])

    def _note_idle(self, entry: Entry) -> None:
        """Files ``entry`` among the idle ones if no request holds it."""
        if entry.is_idle:
            heap = self._inner if entry.key in self._children else self._leaves
            heappush(heap, (entry.used, entry.key))
            if len(heap) > 2 * len(self._entries) + 64:  # most are out of date
                heap[:] = sorted({(e.used, e.key) for _, key in heap if (e := self._entries.get(key)) and e.is_idle})

    def _pop_idle(self, heap: list[tuple[int, bytes]]) -> Entry | None:
        """The least recently used idle entry of a heap."""
        while heap:
            used, key = heappop(heap)
            entry = self._entries.get(key)
            if entry is not None and entry.is_idle and entry.used == used:
                return entry
        return None

    def _root(self, salt: str) -> bytes:
        tables = self._tables
        return hashlib.sha256(repr((salt, self._model, tables.spec.name, tables.spec.main.slots)).encode()).digest()

    def _num_pieces(self, num_tokens: int) -> int:
        """Number of pieces within ``num_tokens``, the request's slot and full blocks."""
        group, in_blocks = self._tables.spec.main, self._tables.spec.main.in_blocks(num_tokens)
        return group.num_token_slots + in_blocks // group.block_tokens if in_blocks >= 0 else 0

    def _piece(self, index: int) -> slice:
        """The range of tokens of piece ``index``, the request's slot or a block."""
        group = self._tables.spec.main
        stop = group.tokens_in(index + 1 - group.num_token_slots)
        return slice(0 if index == 0 else stop - group.block_tokens, stop)


def _extend(key: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(key + array("q", tokens).tobytes()).digest()
