"""Shrinks of memory checked anew: what they lack, and which blocks step down for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .spy import SpySpace


def lacks_bytes(space: SpySpace) -> bool:
    """Whether a shrink lacks bytes, wherever they are."""
    return _to_take(space) > max(0, space.memory.limit() - space.memory.packed())


def _to_take(space: SpySpace) -> int:
    """Bytes that a shrink has to take still."""
    return int(space.tables.arena.nbytes - space.tables.arena.goal_nbytes)


def check_steps(space: SpySpace, steps: list[tuple[Any, int]]) -> None:
    """Checks steps down for a shrink: what it lacks, one rung, the coldest first where none pays for another.

    Where those find no slot a single other one may.
    """
    require(lacks_bytes(space), "blocks step down for a shrink that needs none")
    require(all(rung == block.rung + 1 for block, rung in steps), "a block jumps a rung")
    require(len(steps) <= 8, "a shrink makes a step long")
    if space.options.quota is not None:
        return
    ranks, keys = dict.fromkeys(space.scheduler.running, 0), [id(block) for block, _ in steps]
    coldest = sorted(space._eligible(ranks))[:8]
    needed = [found.key for found in coldest[: space._num_needed(coldest, [], _to_take(space))]]
    others = {found.key for found in space._eligible(ranks, even_recent=True)} - {found.key for found in coldest}
    require(keys == needed or (len(keys) == 1 and keys[0] in others), "other blocks step down than a shrink needs")
