"""How many blocks a work item of decode attention has: a model of the launch's time, fitted to an H200.

Programs begin in the order of their items. Where there are several for every place on the GPU, the last fifth of the
requests is cut finer: what begins last is short, so that all places are busy nearly to the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

EQUAL_BLOCKS = (1, 2, 4, 8, 16, 24, 32)  # few sizes, so that few graphs serve all steps
MIN_ITEMS = 3  # of a request, where it has so many blocks: lengths differ, and fewer items would differ as much
SHORT_ITEM = 4  # blocks, on average: the sinks and open blocks beside sealed ones
RESIDENT = {True: 5, False: 8}  # programs that a multiprocessor holds: on dense pages, which fetch more ahead, or codes
LAST_SHARE = 5  # one request in so many is among the last
LEAST_REQUESTS = 40  # of few, a fifth is too coarse a part
GRADED_ROUNDS = {True: 1.45, False: 2.4}  # full items for each place on the GPU, from which on the last ones are finer
STAY = 0.95  # of these, once they are: another size is another graph

# In units of the time that a block takes in a full launch.
START = 1.5  # a program's start: item, address and page are loads that wait for each other
LEAST_SHARE = 0.8  # what fills less of the GPU than this, in the end, takes as long as if it filled so much
MERGE = 0.1  # for each part of a request
KEEP = 1.05  # how much longer the launch may be with the size in use


class ItemBlocks(NamedTuple):
    """The most blocks of an item, and of one of the last requests."""

    first: int
    last: int


GRADED, GRADED_SHORT = ItemBlocks(32, 11), ItemBlocks(32, 4)
SHORT_REQUEST = 16  # blocks, below which eleven are nearly all


def num_last(batch: int) -> int:
    """How many requests of a launch are the last ones."""
    return batch // LAST_SHARE


def choose_item_blocks(
    num_blocks: int, num_requests: int, num_kv_heads: int, num_multiprocessors: int, are_dense: bool, in_use: ItemBlocks
) -> ItemBlocks:
    """The sizes with the shortest launch for ``num_requests`` that hold ``num_blocks`` together, or nearly so.

    ``are_dense``: most blocks are. Over 24 launches (16 to 2 bits, 14 to 400 requests of 2,048 to 32,768 tokens) the
    choice takes 1.3 % longer than the best of 65, at most 4 %.
    """
    blocks = max(1.0, num_blocks / num_requests)
    slots = RESIDENT[are_dense] * num_multiprocessors

    def rounds(num_items: float) -> float:
        return num_requests * num_items * num_kv_heads / slots

    def cost(size: int) -> float:
        num_items = math.ceil(blocks / size)
        full, rest = divmod(rounds(num_items), 1)
        time = full + (max(rest, LEAST_SHARE) if rest else 0)
        return (blocks / num_items + START) * time + MERGE * num_items

    least = GRADED_ROUNDS[are_dense] * (STAY if in_use.last < in_use.first else 1)
    if num_requests >= LEAST_REQUESTS and rounds(max(1, blocks / GRADED.first)) >= least:
        return GRADED if blocks >= SHORT_REQUEST else GRADED_SHORT
    sizes = [n for n in EQUAL_BLOCKS if n == 1 or math.ceil(blocks / n) >= MIN_ITEMS]
    best = min(sizes, key=cost)
    is_equal = in_use.first == in_use.last and in_use.first in sizes
    return in_use if is_equal and cost(in_use.first) <= KEEP * cost(best) else ItemBlocks(best, best)


def most_items(num_blocks: int, num_requests: int, num_last_blocks: int, sizes: ItemBlocks) -> int:
    """Items that ``num_blocks`` make at most if the last requests hold up to ``num_last_blocks`` of them.

    Each request adds one that is not full.
    """
    last = min(num_blocks, num_last_blocks) if sizes.last < sizes.first else 0
    full = (num_blocks - last) // sizes.first + last // sizes.last + (last > 0)  # both parts may have a rest
    return full + min(num_requests, num_blocks)
