"""Split-KV: the number of blocks in a work item of decode attention, by a model of launch time fitted to an H200."""

from __future__ import annotations

import math
from typing import NamedTuple

SPLIT_BLOCKS = (1, 2, 4, 8, 16, 24, 32)  # candidates for the most blocks of an item
MIN_ITEMS = 3  # items of a request at least, if it has as many blocks: fewer are as uneven as the requests' lengths
SHORT_ITEM = 4  # mean blocks a request on the first rung, up to which items there count as short
DENSE_RESIDENT, CODES_RESIDENT = 5, 8  # programs that a multiprocessor holds: dense pages fetch more ahead
# Of dense pages with more channels a head: fewer programs fit, so that a finer choice fills a round of them.
DENSE_CHANNELS, WIDE_RESIDENT, WIDE_SPLIT_BLOCKS = 128, 3, (1, 2, 4, 8, 12, 16, 24, 32)

# In units of the time that a block takes in a full launch.
START = 1.5  # a program's start: item, address and page are loads that wait for each other
LEAST_SHARE = 0.8  # a last round of programs below 80 % occupancy is charged as 80 % of a full one
MERGE = 0.1  # for each part of a request

# Items of few requests on the rungs of codes whose programs, with 8 KV heads, all find room on an H200 with two pages
# under way. Attention of 16 requests of 2,048 tokens takes .84 of the time without.
DEEP_ITEMS, DEEP_TIME = 96, 0.84

# Of an item whose size must not depend on the batch: with 8 a request alone takes .25 ms more a step, with 2 do 64.
STEADY_BLOCKS = 2


class Bounds(NamedTuple):
    """The launch shape of decode attention: upper bounds of the numbers of work items.

    ``first``: of items on the first rung;  ``others``: of items on all other rungs together, 0 if no block stands
    there;  ``is_short``: items on the first rung are short, such as sinks and open blocks beside sealed ones;
    ``is_steady``: parts are merged in one way, however many there are;  ``is_deep``: items on other rungs are so few
    that each has room for more pages under way.
    """

    first: int
    others: int
    is_short: bool = False
    is_steady: bool = False
    is_deep: bool = False

    @property
    def num_items(self) -> int:
        """Bound of all items together."""
        return self.first + self.others


def choose_split(
    num_blocks: int, num_requests: int, num_kv_heads: int, head_dim: int, num_multiprocessors: int, is_dense: bool
) -> int:
    """The most blocks of a work item, for the shortest launch over ``num_requests`` that hold ``num_blocks`` together.

    ``is_dense``: most blocks are dense.
    """
    blocks = max(1.0, num_blocks / num_requests)
    is_wide = is_dense and head_dim > DENSE_CHANNELS
    programs = WIDE_RESIDENT if is_wide else DENSE_RESIDENT if is_dense else CODES_RESIDENT
    candidates = WIDE_SPLIT_BLOCKS if is_wide else SPLIT_BLOCKS
    resident = programs * num_multiprocessors

    def cost(size: int) -> float:
        num_items = math.ceil(blocks / size)
        full, rest = divmod(num_requests * num_items * num_kv_heads / resident, 1)
        rounds = full + (max(rest, LEAST_SHARE) if rest else 0)
        is_deep = not is_dense and has_deep_items(most_items(num_blocks, num_requests, size), num_requests)
        return ((blocks / num_items + START) * rounds + MERGE * num_items) * (DEEP_TIME if is_deep else 1)

    sizes = [n for n in candidates if n == 1 or math.ceil(blocks / n) >= MIN_ITEMS]
    return min(sizes, key=cost)


def window_blocks(window: int, block_tokens: int) -> int:
    """Blocks that a request's plan of a ``window`` has at most: two at its edges, and a sink."""
    return (window + block_tokens - 2) // block_tokens + 2


def has_deep_items(num_items: int, num_requests: int) -> bool:
    """Whether items on the rungs of codes are so few that each has room for two pages under way.

    Not those of one request, whose warps are too few then: a step of qwen3-8b would take 2 to 6 % longer.
    """
    return 0 < num_items <= DEEP_ITEMS and num_requests > 1


def most_items(num_blocks: int, num_requests: int, item_blocks: int) -> int:
    """Items that ``num_blocks`` on one rung make at most: each request may have one of a single block."""
    return (num_blocks + min(num_requests, num_blocks) * (item_blocks - 1)) // item_blocks
