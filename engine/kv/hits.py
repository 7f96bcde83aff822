"""Which cached pieces serve a request: its hit, by the rules of floors, windows and exactness. No torch.

A piece is the sink of a request or a full block behind it, with a block in each group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from .block import Block, Standing
from .checkpoints import StateCheckpoint
from .spec import GroupSpec, KVSpec

B = TypeVar("B", bound=Standing)


class Hit(NamedTuple):
    """The first ``num_tokens`` of a request that are cached, and their blocks in sight, by group in token order.

    ``checkpoint``: of the states behind them, where layers have states;  ``num_cached``: tokens whose blocks are
    cached, with a checkpoint or without.
    """

    num_tokens: int = 0
    blocks: Sequence[Block] = ()
    checkpoint: StateCheckpoint | None = None
    num_cached: int = 0

    def by_rung(self, group: GroupSpec, index: int) -> dict[str, int]:
        """Its tokens in sight by the name of the rung on which ``group``, with that index, has them now.

        Those of a sink stand on the first.
        """
        tokens: Counter[str] = Counter()
        for block in self.blocks:
            if block.group == index:
                tokens[group.rungs[max(0, block.rung)].name] += group.block_tokens if block.rung >= 0 else group.sink
        return dict(tokens)


class HitRules:
    """What pieces serve requests under ``spec``."""

    def __init__(self, spec: KVSpec):
        self._spec = spec
        self._full = spec.full
        self._windows = [index for index, group in enumerate(spec.groups) if group.visible is not None]

    def longest(self, pieces: Iterable[Sequence[B | None]], num_tokens: int, floor: int) -> list[Sequence[B | None]]:
        """The first of ``pieces``, blocks by group, that all groups can serve to a request of ``num_tokens``."""
        found, allowed = list[Sequence[B | None]](), self._allowed(num_tokens, floor)
        for index, blocks in enumerate(pieces):
            if self._full and not _serves(blocks, index, allowed):
                break
            found.append(blocks)
        served = [self._served(group, found, floor) for group in self._windows]
        return found[: next(n for n in range(len(found), -1, -1) if all(each[n] for each in served))]

    def limits(self, num_tokens: int, floor: int) -> list[tuple[int, int]]:
        """By group the narrowest rung that serves a request of ``num_tokens``, and how many pieces may stand on it."""
        limits = [(group.floors[floor], sys.maxsize) for group in self._spec.groups]
        for group, narrowest, number in self._allowed(num_tokens, floor):
            limits[group] = narrowest, number
        return limits

    def in_sight(self, number: int) -> list[list[int]]:
        """By group those of the first ``number`` pieces that the token behind them sees."""
        num_tokens, sink = piece_of(self._spec.main, number - 1).stop, self._spec.main.num_token_slots
        return [
            [0] * group.sees_sink(num_tokens) + list(range(sink + group.num_passed(num_tokens), number))
            for group in self._spec.groups
        ]

    def _allowed(self, num_tokens: int, floor: int) -> list[tuple[int, int, int]]:
        """For each group that sees all tokens: its index, its narrowest rung, and how many pieces may stand on it."""
        allowed = []
        for index in self._full:
            group = self._spec.groups[index]
            narrowest = group.floors[floor]
            allowed.append((index, narrowest, group.num_token_slots + group.split(num_tokens, narrowest)[1]))
        return allowed

    def _served(self, index: int, found: Sequence[Sequence[Standing | None]], floor: int) -> list[bool]:
        """For each number of pieces from 0, whether a group with a window has those in sight of the next token.

        They may be narrow behind the recent window of that token, so that a request shares no more narrow blocks than
        it is counted with.
        """
        group = self._spec.groups[index]
        sink, narrowest, missing, narrow, served = group.num_token_slots, group.floors[floor], 0, 0, [True]
        for number, blocks in enumerate(found, 1):
            block = blocks[index]
            if number > sink and (block is None or block.rung > narrowest):
                missing = number
            elif block is not None and block.rung > 0:
                narrow = number
            end = piece_of(self._spec.main, number - 1).stop
            first, aged = group.num_passed(end), group.newest(end) // group.block_tokens
            has_sink = not group.sees_sink(end) or found[0][index] is not None
            served.append(has_sink and missing <= sink + first and narrow <= sink + max(first, aged))
        return served

    def num_exact(self, found: Sequence[Sequence[Block | None]], floor: int) -> int:
        """The most of the pieces that are in each group as a request would have them that computed these alone.

        Those behind its recent window on its floor, where they stay; the others dense, and held by nobody for whom they
        step down at another time.
        """
        served = [self._are_exact(index, found, floor) for index in range(len(self._spec.groups))]
        return next(number for number in range(len(found), -1, -1) if all(each[number] for each in served))

    def _are_exact(self, index: int, found: Sequence[Sequence[Block | None]], floor: int) -> list[bool]:
        """``num_exact`` for one group: for each number of pieces from 0, whether it is right."""
        group = self._spec.groups[index]
        slots, narrowest = group.num_token_slots, group.floors[floor]
        num_settled, num_dense, right = [0], [0], [True]  # pieces up to each that are right in either place
        for number, blocks in enumerate(found, 1):
            block = blocks[index]
            is_settled = is_dense = block is None or block.rung < 0  # out of sight, or a sink
            if block is not None and block.rung >= 0:
                is_settled = block.rung == narrowest and all(holder == narrowest for holder in block.holders)
                is_dense = block.rung == 0 and (is_settled or not block.holders)
            num_settled.append(num_settled[-1] + is_settled)
            num_dense.append(num_dense[-1] + is_dense)
            end = piece_of(self._spec.main, number - 1).stop
            first = min(number, slots + group.num_passed(end))
            aged = max(first, min(number, slots + group.newest(end) // group.block_tokens))
            right.append(
                num_settled[aged] - num_settled[first] == aged - first
                and num_dense[number] - num_dense[aged] == number - aged
            )
        return right


def piece_of(group: GroupSpec, index: int) -> slice:
    """The range of tokens of piece ``index`` of a request: the sink of ``group``, or a block of it."""
    stop = group.tokens_in(index + 1 - group.num_token_slots)
    return slice(0 if index == 0 else stop - group.block_tokens, stop)


def _serves(blocks: Sequence[Standing | None], index: int, allowed: Iterable[tuple[int, int, int]]) -> bool:
    """Whether the blocks of piece ``index`` are wide enough in the groups of ``HitRules._allowed``."""
    for group, narrowest, num_narrow in allowed:
        block = blocks[group]
        if block is None or block.rung > (narrowest if index < num_narrow else 0):
            return False
    return True
