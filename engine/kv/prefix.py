"""The prefix cache: full blocks of prompts and outputs, found again by a hash of all tokens so far. No torch.

A block is keyed by SHA-256 over (salt, model, ladder) and all tokens so far; tokens are compared on a hit, so that
even a collision cannot mix requests. A cached block may step down like any other; a hit then continues on the lower
precision, unless the request's floor forbids it.

Groups file their blocks of the same tokens together. A hit needs the blocks of all its tokens in groups that see all,
and those in sight of the next token in groups with a window, which may be given up one by one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from .block import Block
from .table import BlockTables


class Hit(NamedTuple):
    """The first ``num_tokens`` of a request that are cached, and their blocks in sight, by group in token order."""

    num_tokens: int = 0
    blocks: Sequence[Block] = ()


@dataclass(slots=True, eq=False)
class Entry:
    """Cached blocks of the same tokens, which follow those of ``parent``; by group, None for one that is not cached.

    ``used``: serial numbers of the blocks' last uses, equal in groups that see all tokens.
    """

    key: bytes
    blocks: list[Block | None]
    tokens: array[int]
    parent: bytes
    used: list[int]


class PrefixCache:
    """Finds, keeps and gives up shared blocks. Holds one reference on each; owned by the scheduler's thread."""

    def __init__(self, tables: BlockTables, model: str):
        self._tables = tables
        self._model = model
        groups = tables.spec.groups
        self._full = [index for index, group in enumerate(groups) if group.visible is None]
        self._windows = [index for index, group in enumerate(groups) if group.visible is not None]
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[Block, Entry] = {}
        self._children: dict[bytes, int] = {}
        # Heaps of (used, key) of idle entries, some out of date: without a cached block that follows, and with one.
        self._leaves: list[tuple[int, bytes]] = []
        self._inner: list[tuple[int, bytes]] = []
        self._parts: list[tuple[int, int, bytes]] = []  # the same of idle blocks in windows: (used, group, key)
        self._uses = count()
        tables.store.on_lone = self._note_lone
        self._published: dict[str, tuple[int, bytes]] = {}  # request -> blocks filed, key of the last
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    # ---- finding

    def lookup(self, tokens: list[int], salt: str, floor: int, limit: int) -> Hit:
        """The longest cached prefix of ``tokens`` within its first ``limit`` that all groups can serve.

        Blocks that are counted as dense for a request of ``tokens`` must still be dense.
        """
        self.num_queried_tokens += limit
        key, found, allowed = self._root(salt), list[Entry | None](), self._allowed(len(tokens), floor)
        for index in range(self._num_pieces(limit)):
            piece = tokens[self._piece(index)]
            key = _extend(key, piece)
            entry = self._entries.get(key)
            if entry is not None and entry.tokens != array("q", piece):
                entry = None
            if self._full and (entry is None or not _serves(entry, index, allowed)):
                break
            found.append(entry)
        served = [self._served(group, found, floor) for group in self._windows]
        number = next(n for n in range(len(found), -1, -1) if all(each[n] for each in served))
        return self._take(found[:number])

    def _allowed(self, num_tokens: int, floor: int) -> list[tuple[int, int, int]]:
        """For each group that sees all tokens: its index, its narrowest rung, and how many pieces may stand on it."""
        allowed = []
        for index in self._full:
            group = self._tables.spec.groups[index]
            narrowest = group.floors[floor]
            allowed.append((index, narrowest, group.num_token_slots + group.split(num_tokens, narrowest)[1]))
        return allowed

    def _served(self, index: int, found: Sequence[Entry | None], floor: int) -> list[bool]:
        """For each number of pieces from 0, whether a group with a window has those in sight of the next token.

        They may be narrow behind the recent window of that token, so that a request shares no more narrow blocks than
        it is counted with.
        """
        group = self._tables.spec.groups[index]
        sink, narrowest, missing, narrow, served = group.num_token_slots, group.floors[floor], 0, 0, [True]
        for number, entry in enumerate(found, 1):
            block = None if entry is None else entry.blocks[index]
            if number > sink and (block is None or block.rung > narrowest):
                missing = number
            elif block is not None and block.rung > 0:
                narrow = number
            end = self._piece(number - 1).stop
            first, aged = group.num_passed(end), group.newest(end) // group.block_tokens
            has_sink = not group.sees_sink(end) or (found[0] is not None and found[0].blocks[index] is not None)
            served.append(has_sink and missing <= sink + first and narrow <= sink + max(first, aged))
        return served

    def _take(self, found: Sequence[Entry | None]) -> Hit:
        """The hit of these pieces, whose blocks are used now."""
        if not found:
            return Hit()
        num_tokens, sink = self._piece(len(found) - 1).stop, self._tables.spec.main.num_token_slots
        self.num_hit_tokens += num_tokens
        blocks: list[list[Block]] = []
        serials = [next(self._uses) for _ in found]
        for index, group in enumerate(self._tables.spec.groups):
            pieces = [0] if group.sees_sink(num_tokens) else []
            pieces += range(sink + group.num_passed(num_tokens), len(found))
            blocks.append([])
            for piece in pieces:
                entry = found[piece]
                assert entry is not None
                block = entry.blocks[index]
                assert block is not None
                entry.used[index] = serials[piece]
                blocks[-1].append(block)
                self._note_idle(entry, index)
        return Hit(num_tokens, [block for own in blocks for block in own])

    # ---- filing

    def publish(self, request_id: str, tokens: list[int], salt: str, num_computed: int) -> None:
        """Files the blocks of a request that are full and computed and not filed yet."""
        filed, key = self._published.get(request_id, (0, b""))
        num_pieces = self._num_pieces(num_computed)
        if filed >= num_pieces:
            return
        key = key or self._root(salt)
        for index in range(filed, num_pieces):
            piece = tokens[self._piece(index)]
            parent, key = key, _extend(key, piece)
            self._file(
                key, parent, array("q", piece), [group.piece(request_id, index) for group in self._tables.groups]
            )
            self._published[request_id] = (index + 1, key)

    def _file(self, key: bytes, parent: bytes, tokens: array[int], blocks: Sequence[Block | None]) -> None:
        """Files blocks of one piece, as far as none are filed for it yet; None for those that were given back."""
        entry = self._entries.get(key)
        lacking = [i for i, b in enumerate(blocks) if b is not None and (entry is None or entry.blocks[i] is None)]
        if not lacking or (entry is not None and entry.tokens != tokens):
            return
        if entry is None:
            entry = self._entries[key] = Entry(key, [None] * len(blocks), tokens, parent, [0] * len(blocks))
            self._children[parent] = self._children.get(parent, 0) + 1
        used = next(self._uses)
        for index in lacking:
            block = entry.blocks[index] = blocks[index]
            assert block is not None
            entry.used[index] = used
            self._of_block[block] = entry
            block.refs += 1

    def next_end(self, num_computed: int) -> int:
        """Token count at which one more block is full than at ``num_computed``."""
        end: int = self._piece(self._num_pieces(num_computed)).stop
        return end

    def forget(self, request_id: str) -> None:
        """Drops the record of a request that gave its blocks back; the blocks that it filed stay."""
        self._published.pop(request_id, None)

    # ---- giving up

    def evict(self) -> bool:
        """Gives up the least recently used blocks that no request holds: one in a window, or all of the same tokens.

        Of the latter preferably those that no cached block follows.
        """
        part, leaf = self._first_part(), self._first_idle(self._leaves)
        while leaf is not None and leaf.key in self._children:
            heappush(self._inner, heappop(self._leaves))
            leaf = self._first_idle(self._leaves)
        if part is not None and (leaf is None or part[0] <= leaf.used[self._full[0]]):
            self._remove_part(self._entries[part[2]], part[1])
            return True
        # A request may hold the successor of the last ones, computed beside them and filed after them.
        entry = leaf or self._first_idle(self._inner)
        if entry is not None:
            self._remove(entry)
        return entry is not None

    def purge(self, blocks: Iterable[Block]) -> None:
        """Takes out entries of blocks whose values are not trusted."""
        for entry in {self._of_block[block]: None for block in blocks if block in self._of_block}:
            self._remove(entry)

    @property
    def idle_nbytes(self) -> int:
        """Bytes of cached blocks that no request uses; they are given up first when memory runs short."""
        return sum(block.slot.nbytes for block in self._of_block if block.refs == 1)

    def clear(self) -> None:
        """Gives up everything; blocks that requests share stay theirs."""
        for block in self._of_block:
            self._tables.store.drop(block)
        for book in (self._entries, self._of_block, self._children, self._leaves, self._inner, self._parts):
            book.clear()
        self._published.clear()

    def _remove(self, entry: Entry) -> None:
        """Takes an entry out, and all blocks that it has."""
        del self._entries[entry.key]
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            if self._full and entry.parent in self._entries:
                self._note_idle(self._entries[entry.parent], self._full[0])
        for block in entry.blocks:
            if block is not None:
                del self._of_block[block]
                self._tables.store.drop(block)

    def _remove_part(self, entry: Entry, index: int) -> None:
        """Gives up the block of a group with a window, and the entry if it was the last one."""
        block = entry.blocks[index]
        assert block is not None
        del self._of_block[block]
        entry.blocks[index] = None
        self._tables.store.drop(block)
        if not any(entry.blocks):
            self._remove(entry)

    # ---- blocks that no request holds

    def _note_lone(self, block: Block) -> None:
        """Files ``block`` as idle if its one remaining owner is the cache."""
        if block in self._of_block:
            self._note_idle(self._of_block[block], block.group)

    def _note_idle(self, entry: Entry, index: int) -> None:
        """Files the block of ``entry`` in a group among the idle ones if no request holds it."""
        if not self._is_idle(entry, index):
            return
        if index in self._windows:
            heappush(self._parts, (entry.used[index], index, entry.key))
            if len(self._parts) > 2 * len(self._of_block) + 64:  # most are out of date
                self._parts = sorted({part for part in self._parts if self._is_current(*part)})
            return
        heap = self._inner if entry.key in self._children else self._leaves
        heappush(heap, (entry.used[index], entry.key))
        if len(heap) > 2 * len(self._entries) + 64:  # most are out of date
            found = ((key, self._entries.get(key)) for _, key in heap)
            heap[:] = sorted({(e.used[index], key) for key, e in found if e is not None and self._is_idle(e, index)})

    def _is_idle(self, entry: Entry, index: int) -> bool:
        """Whether no request holds the block of a group; where groups see all tokens, the blocks of all of these."""
        groups = [index] if index in self._windows else self._full
        return all((block := entry.blocks[group]) is not None and block.refs == 1 for group in groups)

    def _is_current(self, used: int, index: int, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.used[index] == used and self._is_idle(entry, index)

    def _first_idle(self, heap: list[tuple[int, bytes]]) -> Entry | None:
        """The least recently used idle entry of a heap, which is its first then."""
        while heap and not self._is_current(heap[0][0], self._full[0], heap[0][1]):
            heappop(heap)
        return self._entries[heap[0][1]] if heap else None

    def _first_part(self) -> tuple[int, int, bytes] | None:
        """The least recently used idle block in a window."""
        while self._parts and not self._is_current(*self._parts[0]):
            heappop(self._parts)
        return self._parts[0] if self._parts else None

    # ---- pieces

    def _root(self, salt: str) -> bytes:
        spec = self._tables.spec
        return hashlib.sha256(repr((salt, self._model, spec.name, spec.main.slots)).encode()).digest()

    def _num_pieces(self, num_tokens: int) -> int:
        """Number of pieces within ``num_tokens``, the request's slot and full blocks."""
        group, in_blocks = self._tables.spec.main, self._tables.spec.main.in_blocks(num_tokens)
        return group.num_token_slots + in_blocks // group.block_tokens if in_blocks >= 0 else 0

    def _piece(self, index: int) -> slice:
        """The range of tokens of piece ``index``, the request's slot or a block."""
        group = self._tables.spec.main
        stop = group.tokens_in(index + 1 - group.num_token_slots)
        return slice(0 if index == 0 else stop - group.block_tokens, stop)


def _serves(entry: Entry, index: int, allowed: Iterable[tuple[int, int, int]]) -> bool:
    """Whether the blocks of piece ``index`` are wide enough in the groups of ``PrefixCache._allowed``."""
    for group, narrowest, num_narrow in allowed:
        block = entry.blocks[group]
        if block is None or block.rung > (narrowest if index < num_narrow else 0):
            return False
    return True


def _extend(key: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(key + array("q", tokens).tobytes()).digest()
