"""Paged decode and prefill against their references: odd lengths, any slot order, NaN in slots not owned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode, paged_decode_reference
from qkv_engine.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from qkv_engine.kernels.request_pages import RequestPages

from .common import BLOCK_TOKENS, block_tables, dense_pages, locate, poison_unused, relative_error

SCALE = 0.11
CPU = torch.device("cpu")
LENGTHS = {
    "one token": [1],
    "one block": [128],
    "alone, open block": [257],
    "equal": [200, 200, 200],
    "ragged": [1, 127, 128, 129, 300, 384],
    "full blocks only": [128, 384, 256],
    "open blocks only": [1, 127, 64, 5],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("order", ["sequence", "interleaved", "shuffled"])
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 64), ((2, 2), 80), ((1, 7), 96), ((3, 4), 128)])
def test_decode_equals_the_reference(lengths: list[int], order: str, heads: tuple[int, int], head_dim: int):
    num_kv_heads, group = heads
    pages = dense_pages(20, num_kv_heads, head_dim, torch.float32)
    tables = block_tables(lengths, 20, order=order)
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim)
    expected = paged_decode_reference(q, pages, locate(tables, lengths), SCALE)
    poison_unused(pages.blocks, tables, float("nan"))
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS, q.device)
    assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_in_16_bit_pages(dtype: torch.dtype):
    lengths = [70, 256, 300]
    pages, tables = dense_pages(9, 2, 64, dtype), block_tables(lengths, 9, order="shuffled")
    q = torch.randn(3, 8, 64)
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS, q.device)
    out = paged_decode(q, pages, plan, SCALE)
    assert out.dtype == torch.float32
    assert relative_error(out, paged_decode_reference(q, pages, locate(tables, lengths), SCALE)) < 1e-2


def test_tokens_beyond_the_length_never_matter():
    pages, tables = dense_pages(4, 2, 64, torch.float32), [[2, 0], [1]]
    q, lengths = torch.randn(2, 4, 64), [130, 5]
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS, q.device)
    before = paged_decode(q, pages, plan, SCALE)
    pages.blocks[0][:, :, 2:] = 3e4
    pages.blocks[1][:, :, 5:] = -3e4
    assert torch.equal(paged_decode(q, pages, plan, SCALE), before)


def test_a_request_is_answered_alike_alone_and_in_a_crowd():
    lengths = [300, 1, 129, 512, 77, 256]
    pages, tables = dense_pages(20, 2, 64, torch.float32), block_tables(lengths, 20, order="shuffled")
    q = torch.randn(len(lengths), 4, 64)
    crowd = paged_decode(q, pages, DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS, q.device), SCALE)
    for b in range(len(lengths)):
        plan = DecodePlan.build(locate(tables[b : b + 1], lengths[b : b + 1]), BLOCK_TOKENS, q.device)
        assert relative_error(paged_decode(q[b : b + 1], pages, plan, SCALE), crowd[b : b + 1]) < 1e-6


@pytest.mark.parametrize("tables", [[[3, 4], [3, 5]], [[3, 4, 5], [3, 4, 6], [3, 7]], [[2], [2]]])
def test_blocks_that_requests_share(tables: list[list[int]]):
    pages, lengths = dense_pages(9, 2, 64, torch.float32), [len(table) * BLOCK_TOKENS - 5 for table in tables]
    for sized in (lengths, [n + 5 for n in lengths]):
        q = torch.randn(len(tables), 4, 64)
        plan = DecodePlan.build(locate(tables, sized), BLOCK_TOKENS, q.device)
        expected = paged_decode_reference(q, pages, locate(tables, sized), SCALE)
        assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


def test_blocks_in_a_row_are_read_in_place():
    plan = DecodePlan.build(locate([[3, 4], [5, 6]], [256, 256]), BLOCK_TOKENS, CPU)
    assert [group.slots for group in plan.groups] == [slice(3, 7, 1)]
    strided = DecodePlan.build(locate([[0], [5], [10]], [128] * 3), BLOCK_TOKENS, CPU)
    assert strided.groups[0].slots == slice(0, 11, 5)
    scattered = DecodePlan.build(locate([[0], [9], [11]], [128] * 3), BLOCK_TOKENS, CPU)
    assert isinstance(scattered.groups[0].slots, torch.Tensor)
    far_apart = DecodePlan.build(locate([[i + 50 * (i // 10)] for i in range(20)], [128] * 20), BLOCK_TOKENS, CPU)
    assert [group.slots for group in far_apart.groups] == [slice(0, 10, 1), slice(60, 70, 1)]


@pytest.mark.parametrize("slots", [[4], [1, 3, 5], [5, 1, 3], [6, 0, 5, 2]], ids=str)
def test_sinks_and_open_blocks_of_all_requests_are_attended_in_few_calls(slots: list[int]):
    pages, sink = dense_pages(8, 2, 64, torch.float32), 32
    sinks = torch.randn(9, 3, 2, 2, sink, 64)[:, 1]
    pages = replace(pages, sinks=sinks)
    lengths = [5, 128, 77, 64][: len(slots)]
    requests = [
        RequestPages(sink + n, sink=(8 - slot, sink), open=(slot, n)) for slot, n in zip(slots, lengths, strict=True)
    ]
    q = torch.randn(len(slots), 4, 64)
    expected = paged_decode_reference(q, pages, requests, SCALE)
    poison_unused(pages.blocks, [slots], float("nan"))
    plan = DecodePlan.build(requests, BLOCK_TOKENS, CPU)
    assert len(plan.groups) == (1 if len(slots) == 1 else 2)
    assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5
    grown = [min(n + 9, BLOCK_TOKENS) for n in lengths]
    requests = [replace(r, length=sink + n, open=(r.open[0], n)) for r, n in zip(requests, grown, strict=True)]
    found = paged_decode(q, pages, plan.with_lengths(grown, CPU), SCALE)
    assert relative_error(found, paged_decode_reference(q, pages, requests, SCALE)) < 1e-5


@pytest.mark.parametrize("start", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("num_tokens", [2, 127, 130])
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 2), 64), ((1, 3), 80)])
def test_prefill_equals_the_reference(start: int, num_tokens: int, heads: tuple[int, int], head_dim: int):
    num_kv_heads, group = heads
    pages = dense_pages(8, num_kv_heads, head_dim, torch.float32)
    table = block_tables([start], 8, order="shuffled")[0] if start else []
    past = locate([table], [start])[0]
    q = torch.randn(num_tokens, num_kv_heads * group, head_dim)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim)
    expected = paged_prefill_reference(q, k, v, pages, past, SCALE)
    poison_unused(pages.blocks, [table], float("nan"))
    assert relative_error(paged_prefill(q, k, v, pages, past, SCALE), expected) < 1e-5


def test_prefill_history_in_pieces_equals_the_reference(monkeypatch: pytest.MonkeyPatch):
    from qkv_engine.kernels.paged_prefill import cpu

    monkeypatch.setattr(cpu, "HISTORY_BLOCKS", 2)
    pages = dense_pages(6, 2, 64, torch.float32)
    past = locate([[4, 0, 5, 1, 2]], [4 * BLOCK_TOKENS + 3])[0]
    q, k, v = torch.randn(9, 4, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    out = paged_prefill(q, k, v, pages, past, SCALE)
    assert relative_error(out, paged_prefill_reference(q, k, v, pages, past, SCALE)) < 1e-5
