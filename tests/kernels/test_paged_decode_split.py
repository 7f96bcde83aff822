"""How decode attention is cut into work items: enough room for all of them, and sizes that stay."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.kernels.paged_decode.split import (
    EQUAL_BLOCKS,
    GRADED,
    GRADED_SHORT,
    ItemBlocks,
    choose_item_blocks,
    most_items,
    num_last,
)
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork

SIZES = [ItemBlocks(n, n) for n in EQUAL_BLOCKS] + [GRADED, GRADED_SHORT, ItemBlocks(3, 2)]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.sampled_from(SIZES),
    held=st.lists(st.integers(0, 90), min_size=1, max_size=24),
    padding=st.integers(0, 3),
    data=st.data(),
)
def test_no_item_is_left_out(sizes: ItemBlocks, held: list[int], padding: int, data: st.DataObject):
    """The bound holds for every rung, whoever holds its blocks, and is exact to one a request."""
    batch = len(held) + padding
    rungs = torch.full((batch, 90), ABSENT)
    rng = data.draw(st.randoms(use_true_random=False))
    for row, blocks in enumerate(held):
        rungs[row, :blocks] = torch.tensor([rng.randrange(2) for _ in range(blocks)], dtype=torch.int64)
    work = DecodeWork.build(
        torch.zeros_like(rungs),
        rungs,
        torch.ones(batch),
        split_blocks=[sizes.first] * 2,
        sink_tokens=0,
        block_tokens=128,
        last_blocks=sizes.last,
    )
    last = sum(held[batch - num_last(batch) :])
    for rung in range(2):
        count = int((rungs == rung).sum())
        bound = most_items(count, len(held), last, sizes)
        assert work.num_items[rung] <= bound
        cut = sum(-(-n // sizes.last) for n in held[batch - num_last(batch) :]) if sizes.last < sizes.first else 0
        assert bound <= count // sizes.first + cut + min(len(held), count) + 1


def test_the_last_requests_are_cut_finer():
    rungs = torch.zeros(10, 40, dtype=torch.int64)
    work = DecodeWork.build(
        rungs, rungs, torch.ones(10), split_blocks=[32], sink_tokens=0, block_tokens=128, last_blocks=11
    )
    blocks = [work.items[0][work.items[0, :, 0] == request, 2].tolist() for request in range(10)]
    assert blocks == [[20, 20]] * 8 + [[10] * 4] * 2


def choose(num_requests: int, blocks: float, in_use: ItemBlocks = SIZES[0], are_dense: bool = False) -> ItemBlocks:
    return choose_item_blocks(int(num_requests * blocks), num_requests, 8, 132, are_dense, in_use)


def test_items_are_graded_where_there_are_several_for_each_place():
    assert [choose(n, 64) == GRADED for n in (1, 64, 128, 160, 229, 400)] == [False, False, False, True, True, True]
    assert choose(400, 9) == GRADED_SHORT
    assert [choose(n, 64, are_dense=True) == GRADED for n in (1, 32, 57, 65)] == [False, False, False, True]


def test_sizes_stay_while_they_are_nearly_the_best():
    """A batch that grows and shrinks a little at the border does not change its graphs each time."""
    border = next(n for n in range(64, 256) if choose(n, 64) == GRADED)
    assert choose(border - 2, 64) != GRADED
    assert choose(border - 2, 64, in_use=GRADED) == GRADED
    assert choose(border // 2, 64, in_use=GRADED) != GRADED
    sizes, changes = SIZES[0], 0
    for context in range(1, 400):
        new = choose(16, 0.5 * context, sizes)
        changes += new != sizes
        sizes = new
    assert changes <= 6
