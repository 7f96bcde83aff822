"""The prefix cache reckoned again: the longest hit by brute force, and what steps down and is given up first."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from .broken import require
from .options import Group, Options

CHECKPOINT = -1  # in place of a group


class Part(NamedTuple):
    """Cached blocks that go together; sorts in the order of being given up.

    A block of a group with a window, or all of an entry, which go with its blocks of groups that see all tokens, or one
    of these while another is in use, or a checkpoint.
    """

    is_within: bool  # whether its tenant is within his share, or it is a checkpoint
    rank: int  # of the hints: done, plain, retained
    is_inner: bool  # whether cached blocks follow, which would be lost
    since: int
    is_whole: bool
    group: int
    key: bytes


class Cached:
    """Reads the entries of ``prefix``, which may be None."""

    def __init__(self, prefix: Any, options: Options):
        self._prefix, self.options = prefix, options
        self._since: dict[Any, int] = {}  # of the blocks that were idle at the last check
        self._filed: dict[tuple[bytes, int], Any] = {}  # blocks at the last check
        self.num_replaced = 0  # since the simulator looked

    def blocks(self) -> dict[tuple[bytes, int], Any]:
        """All cached blocks by key and group."""
        entries = {} if self._prefix is None else self._prefix._entries
        return {(e.key, i): block for e in entries.values() for i, block in enumerate(e.blocks) if block is not None}

    def checkpoints(self) -> dict[bytes, Any]:
        """All checkpoints of states by key."""
        return {} if self._prefix is None else dict(self._prefix.checkpoints._found)

    def idle(self) -> list[Part]:
        """What could be given up: blocks that no request holds."""
        return list(self._idle())

    def _idle(self) -> Iterator[Part]:
        entries = {} if self._prefix is None else self._prefix._entries
        inner = {entry.parent for entry in entries.values()}
        groups, over = self.options.groups, self.over()
        for key, checkpoint in self.checkpoints().items():
            if all(slot.refs == 1 for slot in checkpoint.slots):
                yield Part(True, self._prefix.hints.rank(key), False, checkpoint.since, False, CHECKPOINT, key)
        full = self._full()
        for entry in entries.values():
            idle = [block is not None and block.refs == 1 for block in entry.blocks]
            is_within = entry.tenant not in over
            own = [index for index in full if entry.blocks[index] is not None]
            is_whole, order = all(idle[index] for index in own), self._order(entry.key, entry.key in inner)
            for index in own[:1] if is_whole else [index for index in own if idle[index]]:
                yield Part(is_within, *order, entry.since[index], is_whole, 0 if is_whole else index, entry.key)
            for index, group in enumerate(groups):
                if group.visible is not None and idle[index]:
                    yield Part(is_within, *self._order(entry.key, False), entry.since[index], False, index, entry.key)

    def _order(self, key: bytes, is_inner: bool) -> tuple[int, bool]:
        """What comes before age: a piece that is done waits for those that follow it."""
        rank = self._prefix.hints.rank(key)
        return (1 if rank == 0 and is_inner else rank), is_inner

    def shares(self) -> Counter[str]:
        """Bytes of blocks that can be given up, by the tenant that they count for."""
        entries = {} if self._prefix is None else self._prefix._entries
        found = Counter[str]()
        for entry in entries.values():
            idle = [block for block in entry.blocks if block is not None and block.refs == 1]
            found[entry.tenant] += sum(block.slot.nbytes for block in idle)
        return found

    def over(self) -> set[str]:
        """Tenants whose idle blocks take more than their share."""
        if self.options.quota is None or self._prefix is None:
            return set()
        most = self.options.quota * self._prefix._tables.arena.goal_nbytes
        return {tenant for tenant, nbytes in self.shares().items() if nbytes > most}

    def _full(self) -> list[int]:
        return [index for index, group in enumerate(self.options.groups) if group.visible is None]

    def coldest(self, number: int) -> list[Any]:
        """The first ``number`` blocks to step down: of those that no request holds, by rung and age."""
        entries = {} if self._prefix is None else self._prefix._entries
        groups, over = self.options.groups, self.over()
        found = [
            (block.rung, entry.since[index], index, block)
            for entry in entries.values()
            if not over or entry.tenant in over
            for index, block in enumerate(entry.blocks)
            if block is not None and block.refs == 1 and 0 <= block.rung < len(groups[index].sizes) - 1
        ]
        found += [
            (groups[0].place(slot.rung)[1], checkpoint.since, place, slot)
            for checkpoint in self.checkpoints().values()
            if all(slot.refs == 1 for slot in checkpoint.slots)
            for place, slot in enumerate(checkpoint.slots)
            if slot.rung < groups[0].last(slot.rung)
        ]
        return [block for *_, block in sorted(found, key=lambda each: each[:3])[:number]]

    def kinds(self) -> Counter[tuple[int, int]]:
        """Numbers by group and rung of the blocks that can be given up."""
        groups = {(part.key, index) for part in self._idle() for index in self._groups_of(part)}
        blocks = Counter((index, block.rung) for (key, index), block in self.blocks().items() if (key, index) in groups)
        for key, checkpoint in self.checkpoints().items():
            if (key, CHECKPOINT) in groups:
                blocks.update((slot.group, slot.rung) for slot in checkpoint.slots)
        return blocks

    def _groups_of(self, part: Part) -> list[int]:
        if not part.is_whole:
            return [part.group]
        return [index for index, group in enumerate(self.options.groups) if group.visible is None]

    def check_ages(self) -> None:
        """Checks that whoever fell idle later is younger; counts blocks that took the place of others."""
        entries = {} if self._prefix is None else self._prefix._entries
        now = {
            block: entry.since[index]
            for entry in entries.values()
            for index, block in enumerate(entry.blocks)
            if block is not None and block.refs == 1
        }
        for place, block in (blocks := self.blocks()).items():
            before = self._filed.get(place, block)
            require(block.rung <= before.rung, "a cached block gave way to a narrower one")
            self.num_replaced += before is not block
        self._filed = blocks
        if self._prefix is not None and self.options.quota is not None:
            require(self._prefix.idle._shares._nbytes == self.shares(), "bytes of tenants are miscounted")
        last = max(self._since.values(), default=-1)
        require(len(set(now.values())) == len(now), "two blocks fell idle at once")
        for block, since in now.items():
            require(since >= self._since.get(block, last + 1), "a block is as old as when it was idle before")
        self._since = now

    def of(self, part: Part) -> set[tuple[bytes, int]]:
        """The blocks of a part by key and group, and its checkpoint, which goes with the last of its blocks."""
        cached = {(key, i) for key, i in self.blocks() if key == part.key}
        gone = {(key, i) for key, i in cached if part.is_whole or i == part.group}
        goes = part.key in self.checkpoints() and (part.group == CHECKPOINT or gone == cached)
        return gone | ({(part.key, CHECKPOINT)} if goes else set())

    def places(self) -> dict[tuple[bytes, int], Any]:
        """All cached blocks by key and group, and all checkpoints."""
        return {**self.blocks(), **{(key, CHECKPOINT): each for key, each in self.checkpoints().items()}}

    def longest(self, request: Any, *, with_states: bool = True) -> tuple[int, list[list[Any]]]:
        """Tokens of the longest prefix of a request, less one token, that all groups can serve; its blocks by group.

        ``with_states``: a checkpoint stands behind it, if there are states.
        """
        params, options = request.params, self.options
        if self._prefix is None or params.prompt_logprobs is not None or params.num_prefill_tokens is not None:
            return 0, [[] for _ in options.groups]
        cached, ends = self.blocks(), self.ends(request.num_tokens - 1)
        keys, checkpoints = self.keys(request, ends), self.checkpoints()
        for number in range(len(keys), 0, -1):
            if with_states and options.num_states and not self._begins(checkpoints.get(keys[number - 1]), request):
                continue
            found = [
                [cached.get((keys[piece], index)) for piece in self.pieces(group, ends[number - 1], number)]
                for index, group in enumerate(options.groups)
            ]
            if all(self.serves(group, found[i], request, ends[number - 1]) for i, group in enumerate(options.groups)):
                return ends[number - 1], found
        return 0, [[] for _ in options.groups]

    def _begins(self, checkpoint: Any, request: Any) -> bool:
        """Whether a request may begin on a checkpoint, if there is one: no state is narrower than it allows."""
        group, floor = self.options.groups[0], self.options.floor(request.params)
        most = group.state_floors[floor] if self.options.state_below else 0
        return checkpoint is not None and all(group.place(slot.rung)[1] <= most for slot in checkpoint.slots)

    def check_filed(self, request: Any, tables: list[Any], start: int, num_tokens: int) -> None:
        """Checks that no block of ``request`` among its pieces from ``start`` on is worth more than the one filed.

        ``num_tokens`` of it are computed; ``tables``: its tables by group.
        """
        if self._prefix is None or request.params.num_prefill_tokens is not None:
            return
        ends, cached, sink = self.ends(num_tokens), self.blocks(), int(self.options.sink > 0)
        for piece, key in enumerate(self.keys(request, ends)):
            for index, table in enumerate(tables if piece >= start else ()):
                number = piece - sink - table.first
                own = table.blocks[number] if 0 <= number < len(table.blocks) else None
                if own is not None and piece >= sink:
                    filed = cached.get((key, index))
                    require(filed is not None and filed.rung <= own.rung, "a block is kept though a wider one came")
                    is_worth = filed is own or filed.refs > 1 or filed.rung < own.rung
                    require(is_worth, "an idle block is kept though one as wide came")

    def ends(self, num_tokens: int) -> list[int]:
        """The tokens behind the pieces within the first ``num_tokens``."""
        sink, block = self.options.sink, self.options.block
        ends = [sink] * (sink > 0) + list(range(sink + block, num_tokens + 1, block))
        return [end for end in ends if end <= num_tokens]

    def keys(self, request: Any, ends: list[int]) -> list[bytes]:
        """Keys of the pieces of a request that end at ``ends``."""
        keys, key = list[bytes](), self._prefix._root(request.params.cache_salt)
        for start, end in pairwise([0, *ends]):
            key = hashlib.sha256(key + array("q", request.token_ids[start:end]).tobytes()).digest()
            keys.append(key)
        return keys

    def pieces(self, group: Group, end: int, number: int) -> list[int]:
        """Those of the first ``number`` pieces, which end at token ``end``, that the next token sees."""
        sink = int(group.sink > 0)
        return [0] * group.sees_sink(end) + list(range(sink + group.num_passed(end), number))

    def serves(self, group: Group, blocks: list[Any], request: Any, end: int) -> bool:
        """Whether blocks are there, on the request's floor or above, and dense where the request is counted so."""
        if any(block is None for block in blocks):
            return False
        floor = group.floors[self.options.floor(request.params)]
        begins = end if group.visible is not None else group.end(group.blocks_for(request.num_tokens) - 2)
        first, num_aged = group.num_passed(end), group.num_aged(begins)
        own = [block for block in blocks if block.rung >= 0]
        return all(block.rung <= (floor if i < num_aged else 0) for i, block in enumerate(own, first))
