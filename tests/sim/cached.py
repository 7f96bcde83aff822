"""The prefix cache reckoned again, from its entries alone: hits, idle blocks, and which are given up next."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from .options import Group, Options

Part = tuple[bytes, int]  # a cached block: the key of its entry, and its group


class Cached:
    """What a prefix cache holds; nothing if there is none."""

    def __init__(self, prefix: Any, options: Options):
        self.prefix, self.options = prefix, options
        self._full = [index for index, group in enumerate(options.groups) if group.visible is None]
        self._windows = [index for index, group in enumerate(options.groups) if group.visible is not None]

    @property
    def entries(self) -> dict[bytes, Any]:
        return {} if self.prefix is None else self.prefix._entries

    def parts(self) -> dict[Part, Any]:
        """All cached blocks."""
        return {
            (key, index): block
            for key, entry in self.entries.items()
            for index, block in enumerate(entry.blocks)
            if block is not None
        }

    def given_up_next(self) -> set[Part]:
        """The blocks that go first: the least recently used one in a window, or those of all groups of a piece.

        Pieces without followers come before others. Empty if requests hold all.
        """
        idle = {part for part, block in self.parts().items() if block.refs == 1}
        inner = {entry.parent for entry in self.entries.values()}
        pieces = [key for key in self.entries if self._full and all((key, index) in idle for index in self._full)]
        first = [(self.entries[key].used[index], 0, key, index) for key, index in idle if index in self._windows]
        first += [(self.entries[key].used[self._full[0]], 1, key, 0) for key in pieces if key not in inner]
        last = [(self.entries[key].used[self._full[0]], 1, key, 0) for key in pieces]
        found = min(first or last, default=None)
        if found is None:
            return set()
        _, is_piece, key, index = found
        return {part for part in self.parts() if part[0] == key} if is_piece else {(key, index)}

    def longest_hit(self, request: Any) -> int:
        """Tokens of ``request`` whose blocks all groups can serve, one left to compute."""
        options, floor = self.options, self.options.floor(request.params)
        entries, key, end = list[Any](), self.prefix._root(request.params.cache_salt), 0
        while (next_end := end + options.block if end or not options.sink else options.sink) < request.num_tokens:
            tokens = array("q", request.token_ids[end:next_end])
            key, end = hashlib.sha256(key + tokens.tobytes()).digest(), next_end
            entry = self.entries.get(key)
            entries.append(entry if entry is not None and entry.tokens == tokens else None)
        for number in range(len(entries), 0, -1):
            num_tokens = options.sink + (number - (options.sink > 0)) * options.block
            if all(
                self._serves(index, group, entries[:number], num_tokens, request.num_tokens, group.floors[floor])
                for index, group in enumerate(options.groups)
            ):
                return num_tokens
        return 0

    def _serves(
        self, index: int, group: Group, entries: list[Any], num_tokens: int, known: int, narrowest: int
    ) -> bool:
        """Whether a group has the blocks that the token at ``num_tokens`` sees, wide enough."""
        sinks = int(group.sink > 0)
        begins = group.end(group.blocks_for(known) - 2) if group.visible is None else num_tokens
        for piece, entry in enumerate(entries):
            is_seen = group.sees_sink(num_tokens) if piece < sinks else piece - sinks >= group.num_passed(num_tokens)
            if self._full and (entry is None or any(entry.blocks[full] is None for full in self._full)):
                return False
            if is_seen and (entry is None or entry.blocks[index] is None):
                return False
            allowed = narrowest if piece - sinks < group.num_aged(begins) else 0
            if is_seen and entry.blocks[index].rung > allowed:
                return False
        return True
