"""Launch shapes of decode attention: they hold all items, and few of them serve all steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.device.gpu.graphs import MAX_GRAPHS
from qkv_engine.device.gpu.mixed import padded_decodes
from qkv_engine.device.gpu.shapes import LaunchShapes
from qkv_engine.device.gpu.steps import padded_batch
from qkv_engine.kernels.paged_decode.split import Bounds, most_items, window_blocks
from qkv_engine.kernels.paged_decode.triton import kernel_names

SHAPES = LaunchShapes(num_kv_heads=8, head_dim=128, num_multiprocessors=132)


@pytest.mark.parametrize(
    ("counts", "num_decodes", "expected"),
    [
        ([1], 1, (1, Bounds(64, 0, True))),  # a lone short request: an item a block
        ([8], 1, (1, Bounds(64, 0))),
        ([65], 1, (4, Bounds(64, 0))),  # fewer parts to merge
        ([1024], 1, (16, Bounds(64, 0))),
        ([2, 63, 0], 1, (4, Bounds(64, 64, True))),
        ([32, 16 * 14], 16, (4, Bounds(64, 128, True, is_deep=True))),  # room for two pages a program
        (
            [32, 16 * 8],
            16,
            (2, Bounds(64, 128, True, is_deep=True)),
        ),  # more items than the first rung, so they go first
        ([16, 8 * 8], 8, (1, Bounds(64, 64, True, is_deep=True))),
        ([32, 16 * 24], 16, (4, Bounds(64, 128, True))),
        ([256, 40], 128, (1, Bounds(256, 256, True))),  # few only for now
        ([65 * 32], 32, (16, Bounds(256, 0))),
        ([4 * 64], 64, (4, Bounds(128, 0, True))),  # two short items a request
        ([128, 64 * 63], 64, (16, Bounds(128, 512, True))),  # codes have room for twice as many
        ([128, 64 * 43, 64 * 20], 64, (16, Bounds(128, 512, True))),  # one bound for all but the first rung
        ([512, 256 * 128], 256, (32, Bounds(512, 1536, True))),  # many requests: finer bounds
        ([64 * 30, 64 * 33], 64, (16, Bounds(256, 256))),
        ([0, 8], 1, (1, Bounds(64, 64, True))),
    ],
)
def test_attention_is_split_into_enough_items(counts: list[int], num_decodes: int, expected: tuple[int, Bounds]):
    assert SHAPES.split(counts, num_decodes, num_decodes) == expected


@pytest.mark.parametrize("batch", [1, 4, 64, 256])
@pytest.mark.parametrize("window", [1, 128, 129, 1024, 4096])
def test_bounds_of_a_window_hold_for_every_length(window: int, batch: int):
    """Blocks of each request on any rungs, as many as its window may touch."""
    rng, num_rungs, block = random.Random(window + batch), 4, 128
    for others in (False, True):
        size, bounds = SHAPES.split_window(window, block, num_rungs if others else 1, batch)
        assert (bounds.others > 0) == others
        for _ in range(200):
            items = [0] * num_rungs
            for _ in range(batch):
                length, sink = rng.randint(1, 3 * window), rng.choice((0, 1, 32))
                first = max(0, length - window - sink) // block
                seen = -(-max(0, length - sink) // block) - first + (length - window < sink and sink > 0)
                held = [rng.randrange(num_rungs) if others else 0 for _ in range(seen)]
                items = [n + -(-held.count(rung) // size) for rung, n in enumerate(items)]
            assert items[0] <= bounds.first and sum(items[1:]) <= bounds.others
            assert seen <= window_blocks(window, block)


def test_few_shapes_serve_blocks_that_step_down():
    """Twenty requests grow to twenty blocks each while these step down, and end one after the other."""
    counts = [20, 0, 0]
    shapes = set()
    for step in range(400):
        counts[0] = 20 + min(step, 380) - (step > 100) * (step - 100)
        counts[1], counts[2] = max(0, step - 100) - max(0, step - 250), max(0, step - 250)
        shapes.add(SHAPES.split(counts, 20, 32)[1])
    assert len(shapes) <= 8


def graphs_of_a_run(num_rungs: int) -> int:
    """Keys met while requests come, grow and go, and their blocks step down from rung to rung as room gets short."""
    rng, keys = random.Random(1), set()
    batch, pressure = 40.0, 0.0
    for step in range(4000):
        batch = min(64.0, max(16.0, batch + rng.uniform(-0.5, 0.5)))
        pressure = min(1.0, max(0.0, pressure + rng.uniform(-0.02, 0.02)))
        num_decodes, blocks = round(batch), 20 + step % 1000 // 20
        counts = [2 * num_decodes] + [0] * (num_rungs - 1)
        for block in range(blocks):  # the coldest are as narrow as the pressure says, the warmest a little wider
            depth = max(0.0, pressure - 0.3 * block / blocks)
            counts[1 + round(depth * (num_rungs - 2))] += num_decodes
        keys.add((padded_batch(num_decodes), SHAPES.split(counts, num_decodes, padded_batch(num_decodes))[1]))
    return len(keys)


def test_more_rungs_are_not_more_graphs():
    few, many = graphs_of_a_run(4), graphs_of_a_run(12)
    assert many <= 1.1 * few and few < MAX_GRAPHS


def test_a_batch_beside_chunks_has_one_shape():
    for counts in ([0, 0], [40, 0], [3, 37], [64 * 16, 1], [64 * 300, 0], [64 * 4, 64 * 300]):
        assert SHAPES.split(counts, 40, 64, beside_chunks=True)[1] == Bounds(256, 256)
    assert SHAPES.split([64 * 30], 40, 64, beside_chunks=True)[1] == Bounds(256, 0)


@pytest.mark.parametrize("beside_chunks", [False, True])
@settings(deadline=None)
@given(
    held=st.lists(st.lists(st.integers(0, 300), min_size=3, max_size=3), min_size=1, max_size=80),
    scale=st.sampled_from([1, 10, 100]),
)
def test_bounds_hold_all_items(held: list[list[int]], scale: int, beside_chunks: bool):
    """``held``: blocks by rung of each request."""
    held = [[count // scale for count in counts] for counts in held]
    held[0][0] += 1
    pad = padded_decodes if beside_chunks else padded_batch
    totals = [sum(counts) for counts in zip(*held, strict=True)]
    size, bounds = SHAPES.split(totals, len(held), pad(len(held)), beside_chunks)
    first, *others = (sum(-(-counts[rung] // size) for counts in held) for rung in range(3))
    assert first <= bounds.first and sum(others) <= bounds.others


def test_a_steady_item_has_as_many_blocks_whatever_the_batch():
    shapes = replace(SHAPES, item_blocks=8)
    seen = set[Bounds]()
    for batch in (1, 3, 64, 256):
        for counts in ([batch], [40 * batch], [2 * batch, 70 * batch]):
            for beside_chunks in (False, True):
                size, bounds = shapes.split(counts, batch, batch, beside_chunks)
                first, *others = (most_items(count, batch, 8) for count in counts)
                assert size == 8 and bounds.is_steady and bounds.first >= first and bounds.others >= sum(others)
                seen.add(bounds)
        size, bounds = shapes.split_window(1024, 128, 2, batch)
        assert size == 8 and bounds.is_steady
    assert len({kernel_names(bounds, 8)[1] for bounds in seen}) == 1
    assert all(bounds.is_steady for bounds in shapes.all_bounds(4, [[4, 300]], [3, 4]))
