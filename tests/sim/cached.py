"""The prefix cache reckoned again: the longest hit by brute force, and what is given up first."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from .options import Group, Options


class Part(NamedTuple):
    """Cached blocks that go together; sorts in the order of being given up.

    A block of a group with a window, or all of an entry, which go with its blocks of groups that see all tokens.
    """

    is_inner: bool  # whether cached blocks follow, which would be lost
    used: int
    is_whole: bool
    group: int
    key: bytes


class Cached:
    """Reads the entries of ``prefix``, which may be None."""

    def __init__(self, prefix: Any, options: Options):
        self._prefix, self.options = prefix, options

    def blocks(self) -> dict[tuple[bytes, int], Any]:
        """All cached blocks by key and group."""
        entries = {} if self._prefix is None else self._prefix._entries
        return {(e.key, i): block for e in entries.values() for i, block in enumerate(e.blocks) if block is not None}

    def idle(self) -> list[Part]:
        """What could be given up: blocks that no request holds."""
        return list(self._idle())

    def _idle(self) -> Iterator[Part]:
        entries = {} if self._prefix is None else self._prefix._entries
        inner = {entry.parent for entry in entries.values()}
        groups = self.options.groups
        full = [index for index, group in enumerate(groups) if group.visible is None]
        for entry in entries.values():
            idle = [block is not None and block.refs == 1 for block in entry.blocks]
            if full and all(idle[index] for index in full):
                yield Part(entry.key in inner, entry.used[full[0]], True, 0, entry.key)
            for index, group in enumerate(groups):
                if group.visible is not None and idle[index]:
                    yield Part(False, entry.used[index], False, index, entry.key)

    def of(self, part: Part) -> set[tuple[bytes, int]]:
        """The blocks of a part by key and group."""
        return {(key, i) for key, i in self.blocks() if key == part.key and (part.is_whole or i == part.group)}

    def longest(self, request: Any) -> list[list[Any]]:
        """The blocks by group of the longest prefix of a request, less one token, that all groups can serve."""
        params, options = request.params, self.options
        if self._prefix is None or params.prompt_logprobs is not None or params.num_prefill_tokens is not None:
            return [[] for _ in options.groups]
        key, cached = self._prefix._root(params.cache_salt), self.blocks()
        ends = [options.sink] * (options.sink > 0)
        ends += range(options.sink + options.block, request.num_tokens, options.block)
        keys, start = list[bytes](), 0
        for end in (end for end in ends if end < request.num_tokens):
            key = hashlib.sha256(key + array("q", request.token_ids[start:end]).tobytes()).digest()
            keys.append(key)
            start = end
        for number in range(len(keys), 0, -1):
            found = [
                [cached.get((keys[piece], index)) for piece in self._pieces(group, ends[number - 1], number)]
                for index, group in enumerate(options.groups)
            ]
            if all(self._serves(group, found[i], request, ends[number - 1]) for i, group in enumerate(options.groups)):
                return found
        return [[] for _ in options.groups]

    def _pieces(self, group: Group, end: int, number: int) -> list[int]:
        """Those of the first ``number`` pieces, which end at token ``end``, that the next token sees."""
        sink = int(group.sink > 0)
        return [0] * group.sees_sink(end) + list(range(sink + group.num_passed(end), number))

    def _serves(self, group: Group, blocks: list[Any], request: Any, end: int) -> bool:
        """Whether blocks are there, on the request's floor or above, and dense where the request is counted so."""
        if any(block is None for block in blocks):
            return False
        floor = group.floors[self.options.floor(request.params)]
        begins = end if group.visible is not None else group.end(group.blocks_for(request.num_tokens) - 2)
        first, num_aged = group.num_passed(end), group.num_aged(begins)
        own = [block for block in blocks if block.rung >= 0]
        return all(block.rung <= (floor if i < num_aged else 0) for i, block in enumerate(own, first))
