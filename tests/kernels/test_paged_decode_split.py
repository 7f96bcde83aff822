"""Split-KV of decode attention: enough room for all work items, and how many blocks an item has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.split import WIDE_SPLIT_BLOCKS, Bounds, choose_split, most_items

NUM_RUNGS = 3


def build(rungs: torch.Tensor, item_blocks: int) -> DecodeWork:
    return DecodeWork.build(
        torch.zeros_like(rungs),
        rungs,
        torch.ones(len(rungs)),
        num_rungs=NUM_RUNGS,
        item_blocks=item_blocks,
        sink_tokens=0,
        block_tokens=128,
    )


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([*WIDE_SPLIT_BLOCKS, 3]),
    held=st.lists(st.integers(0, 90), min_size=1, max_size=24),
    data=st.data(),
)
def test_no_item_is_left_out(size: int, held: list[int], data: st.DataObject):
    """The bound holds for every rung, whoever holds its blocks, and is exact to one a request."""
    rungs = torch.full((len(held), 90), ABSENT)
    rng = data.draw(st.randoms(use_true_random=False))
    for row, blocks in enumerate(held):
        rungs[row, :blocks] = torch.tensor([rng.randrange(NUM_RUNGS) for _ in range(blocks)], dtype=torch.int64)
    work = build(rungs, size)
    num_items = work.item_first.diff().tolist()
    assert work.bounds == Bounds(num_items[0], sum(num_items[1:]))
    for rung, number in enumerate(num_items):
        count = int((rungs == rung).sum())
        assert number <= most_items(count, len(held), size) <= number + min(len(held), count)


def test_a_run_makes_equal_items():
    rungs = torch.tensor([[1] * 40, [2] * 3 + [0] * 37])
    work = build(rungs, 32)
    assert work.item_first.tolist() == [0, 2, 4, 5]
    assert work.items.tolist() == [
        [1, 40, 18, 2, 0],
        [1, 58, 19, 3, 0],
        [0, 0, 20, 0, 1],
        [0, 20, 20, 1, 1],
        [1, 77, 3, 4, 2],
    ]


def choose(num_requests: int, blocks: float, is_dense: bool = False) -> int:
    return choose_split(int(num_requests * blocks), num_requests, 8, 128, 132, is_dense)


def test_items_have_few_blocks_where_there_are_few_requests():
    assert [choose(n, 64) for n in (1, 4, 16, 229, 400)] == [2, 4, 8, 16, 24]
    assert choose(1, 64) < choose(1, 1024)  # fewer parts to merge
    assert choose(1, 0) == choose(1, 1) == choose(400, 1) == 1


def test_longer_contexts_never_have_smaller_items():
    sizes = [choose(16, 0.5 * n) for n in range(2, 400)]
    assert sizes[0] == 1 and sizes[-1] > 8 and len(set(sizes)) > 3


@pytest.mark.parametrize(("num_requests", "size"), [(1, 2), (16, 12), (64, 24)])
def test_items_of_wide_heads_fill_a_round_of_programs(num_requests: int, size: int):
    """Three programs a multiprocessor where heads have 256 channels; 4 of them, 64 blocks a request, as measured."""
    assert choose_split(64 * num_requests, num_requests, 4, 256, 132, is_dense=True) == size
    narrow = [choose_split(64 * num_requests, num_requests, 4, dim, 132, False) for dim in (128, 256)]
    assert narrow[0] == narrow[1]
