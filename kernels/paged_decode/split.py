"""Split-KV: the number of blocks in a work item of decode attention, by a model of launch time fitted to an H200."""

from __future__ import annotations

import math
from typing import NamedTuple

SPLIT_BLOCKS = (1, 2, 4, 8, 16, 24, 32)  # few sizes, so that few graphs serve all steps
MIN_ITEMS = 3  # least items of a request with as many blocks: fewer would be as uneven as the requests' lengths
SHORT_ITEM = 4  # mean blocks a request on the first rung, up to which items there count as short
DENSE_RESIDENT, CODES_RESIDENT = 5, 8  # programs that a multiprocessor holds: dense pages fetch more ahead

# In units of the time that a block takes in a full launch.
START = 1.5  # a program's start: item, address and page are loads that wait for each other
LEAST_SHARE = 0.8  # a last round of programs below 80 % occupancy is charged as 80 % of a full one
MERGE = 0.1  # for each part of a request
KEEP = 1.05  # hysteresis: the size in use stays up to 1.05 times the best cost, as a new size means a new graph


class Split(NamedTuple):
    """The launch shape of decode attention: how blocks are split into work items, and bounds of their numbers.

    ``item_blocks``: the most blocks of an item;  ``max_items``: bounds of the items on the first rung, and on all
    other rungs together;  ``rungs``: the rungs that may hold items;  ``is_short``: items on the first rung are short,
    sinks and open blocks beside sealed ones.
    """

    item_blocks: int
    max_items: tuple[int, int]
    rungs: tuple[int, ...]
    is_short: bool = False


def choose_split(
    num_blocks: int, num_requests: int, num_kv_heads: int, num_multiprocessors: int, is_dense: bool, in_use: int
) -> int:
    """Blocks of an item with the shortest launch, or nearly, for ``num_requests`` that hold ``num_blocks`` together.

    ``is_dense``: most blocks are dense. ``in_use``: the size of the last step.
    """
    blocks = max(1.0, num_blocks / num_requests)
    resident = (DENSE_RESIDENT if is_dense else CODES_RESIDENT) * num_multiprocessors

    def cost(size: int) -> float:
        num_items = math.ceil(blocks / size)
        full, rest = divmod(num_requests * num_items * num_kv_heads / resident, 1)
        rounds = full + (max(rest, LEAST_SHARE) if rest else 0)
        return (blocks / num_items + START) * rounds + MERGE * num_items

    sizes = [n for n in SPLIT_BLOCKS if n == 1 or math.ceil(blocks / n) >= MIN_ITEMS]
    best = min(sizes, key=cost)
    return in_use if in_use in sizes and cost(in_use) <= KEEP * cost(best) else best


def most_items(num_blocks: int, num_requests: int, item_blocks: int) -> int:
    """Items that ``num_blocks`` on one rung make at most: each request adds one that is not full."""
    return num_blocks // item_blocks + min(num_requests, num_blocks)
