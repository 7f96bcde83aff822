"""How many blocks a work item of decode attention has: a model of the launch's time, fitted to an H200."""

from __future__ import annotations

import math

ITEM_BLOCKS = (1, 2, 4, 8, 16, 24, 32)  # few sizes, so that few graphs serve all steps
MIN_ITEMS = 3  # of a request, where it has so many blocks: lengths differ, and fewer items would differ as much
SHORT_ITEM = 4  # blocks, on average: the sinks and open blocks beside sealed ones
RESIDENT = {True: 5, False: 8}  # programs that a multiprocessor holds: on dense pages, which fetch more ahead, or codes

# In units of the time that a block takes in a full launch.
START = 1.5  # a program's start: item, address and page are loads that wait for each other
LEAST_SHARE = 0.8  # what fills less of the GPU than this, in the end, takes as long as if it filled so much
MERGE = 0.1  # for each part of a request
KEEP = 1.05  # how much longer the launch may be with the size in use: another size is another graph


def choose_item_blocks(
    num_blocks: int, num_requests: int, num_kv_heads: int, num_multiprocessors: int, are_dense: bool, in_use: int
) -> int:
    """The item size with the shortest launch for ``num_requests`` that hold ``num_blocks`` together, or nearly so.

    ``are_dense``: most blocks are. On 30 sizes (16 to 2 bits, 4 to 384 requests of 8,192 tokens) the choice takes 2.4 %
    longer than the best size, at most 13 %.
    """
    blocks = max(1.0, num_blocks / num_requests)
    slots = RESIDENT[are_dense] * num_multiprocessors

    def cost(size: int) -> float:
        num_items = math.ceil(blocks / size)
        waves = num_requests * num_items * num_kv_heads / slots
        rest = waves % 1
        time = waves - rest + (max(rest, LEAST_SHARE) if rest else 0)
        return (blocks / num_items + START) * time + MERGE * num_items

    sizes = [n for n in ITEM_BLOCKS if n == 1 or math.ceil(blocks / n) >= MIN_ITEMS]
    best = min(sizes, key=cost)
    return in_use if in_use in sizes and cost(in_use) <= KEEP * cost(best) else best
