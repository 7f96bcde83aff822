"""Shrinks of memory checked anew: what they lack, and which blocks of requests step down for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .relief import Relief


def lacks_bytes(relief: Relief) -> bool:
    """Whether a shrink lacks bytes, wherever they are."""
    return bytes_to_take(relief) > max(0, relief.memory.limit() - relief.memory.packed())


def bytes_to_take(relief: Relief) -> int:
    """Bytes that a shrink has to take still."""
    return int(relief.tables.arena.nbytes - relief.tables.arena.goal_nbytes)


def check_steps(relief: Relief, steps: list[tuple[Any, int]]) -> None:
    """Checks steps down for a shrink: what it lacks, one rung, the coldest first where none pays for another.

    Where those find no slot a single other one may.
    """
    require(lacks_bytes(relief), "blocks step down for a shrink that needs none")
    require(all(rung == block.rung + 1 for block, rung in steps), "a block jumps a rung")
    if relief.options.quota is not None:
        return
    ranks, keys = dict.fromkeys(relief.scheduler.running, 0), [id(block) for block, _ in steps]
    coldest = sorted(relief._eligible(ranks))[:8]
    needed = [found.key for found in coldest[: relief._num_needed(coldest, [])]]
    others = {found.key for found in relief._eligible(ranks, even_recent=True)} - {found.key for found in coldest}
    require(keys == needed or (len(keys) == 1 and keys[0] in others), "other blocks step down than a shrink needs")


def check_end(relief: Relief) -> None:
    """Checks that a shrink did something in a step if it lacked bytes and a block of a request could step down."""
    if relief.num_shrunk or not lacks_bytes(relief) or relief.cached.idle():
        return
    for tenant in {request.params.tenant for request in relief.scheduler.running}:
        found = relief._eligible(relief._ranks(tenant), even_recent=True)
        require(not any(map(relief._finds_slot, found)), "a shrink waits though a block could step down")
