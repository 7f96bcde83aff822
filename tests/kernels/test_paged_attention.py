"""Paged decode and prefill against their references: odd lengths, any slot order, NaN in slots not owned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode, paged_decode_reference
from qkv_engine.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from qkv_engine.kernels.request_pages import LayerPages, RequestPages

from .common import BLOCK_TOKENS, block_tables, dense_pages, locate, poison_unused, relative_error

SCALE = 0.11
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
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS)
    assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_in_16_bit_pages(dtype: torch.dtype):
    lengths = [70, 256, 300]
    pages, tables = dense_pages(9, 2, 64, dtype), block_tables(lengths, 9, order="shuffled")
    q = torch.randn(3, 8, 64)
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS)
    out = paged_decode(q, pages, plan, SCALE)
    assert out.dtype == torch.float32
    assert relative_error(out, paged_decode_reference(q, pages, locate(tables, lengths), SCALE)) < 1e-2


def test_tokens_beyond_the_length_never_matter():
    pages, tables = dense_pages(4, 2, 64, torch.float32), [[2, 0], [1]]
    q, lengths = torch.randn(2, 4, 64), [130, 5]
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS)
    before = paged_decode(q, pages, plan, SCALE)
    pages.blocks[0][:, :, 2:] = 3e4
    pages.blocks[1][:, :, 5:] = -3e4
    assert torch.equal(paged_decode(q, pages, plan, SCALE), before)


def test_a_request_is_answered_alike_alone_and_in_a_crowd():
    lengths = [300, 1, 129, 512, 77, 256]
    pages, tables = dense_pages(20, 2, 64, torch.float32), block_tables(lengths, 20, order="shuffled")
    q = torch.randn(len(lengths), 4, 64)
    crowd = paged_decode(q, pages, DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS), SCALE)
    for b in range(len(lengths)):
        plan = DecodePlan.build(locate(tables[b : b + 1], lengths[b : b + 1]), BLOCK_TOKENS)
        assert relative_error(paged_decode(q[b : b + 1], pages, plan, SCALE), crowd[b : b + 1]) < 1e-6


@pytest.mark.parametrize("tables", [[[3, 4], [3, 5]], [[3, 4, 5], [3, 4, 6], [3, 7]], [[2], [2]]])
def test_blocks_that_requests_share(tables: list[list[int]]):
    pages, lengths = dense_pages(9, 2, 64, torch.float32), [len(table) * BLOCK_TOKENS - 5 for table in tables]
    for sized in (lengths, [n + 5 for n in lengths]):
        q = torch.randn(len(tables), 4, 64)
        plan = DecodePlan.build(locate(tables, sized), BLOCK_TOKENS)
        expected = paged_decode_reference(q, pages, locate(tables, sized), SCALE)
        assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


def test_evenly_spaced_blocks_are_read_in_place():
    def slots_read(tables: list[list[int]]):
        plan = DecodePlan.build(locate(tables, [len(table) * BLOCK_TOKENS for table in tables]), BLOCK_TOKENS)
        return [column.slots for group in plan.groups for column in group.columns]

    assert slots_read([[3, 4], [5, 6]]) == [slice(3, 7, 1)]
    assert slots_read([[0], [5], [10]]) == [slice(0, 11, 5)]
    in_runs = slots_read([[9], [10], [11], [12], [0], [3], [4], [5], [6]])
    assert in_runs == [slice(3, 7, 1), slice(9, 13, 1), slice(0, 1, 1)]
    assert [slots.tolist() for slots in slots_read([[9], [0], [11]])] == [[9, 0, 11]]


@pytest.mark.parametrize(
    "places", [[12, 11, 10, 9, 3, 4, 5, 6], [3, 5, 7, 9, 10, 11, 12, 0], [8, 4, 11, 0, 3, 9, 6, 1]]
)
def test_runs_of_blocks_are_attended_as_scattered_ones_are(places: list[int]):
    pages, tables = dense_pages(26, 2, 64, torch.float32), [[13 + place, place] for place in places]
    poison_unused(pages.blocks, tables, float("nan"))
    q, lengths = torch.randn(len(places), 4, 64), [BLOCK_TOKENS + 30 + place for place in places]
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS)
    for grown in (0, 1, 80):
        requests = locate(tables, [length + grown for length in lengths])
        later = plan.with_lengths([length + grown - BLOCK_TOKENS for length in lengths])
        expected = paged_decode_reference(q, pages, requests, SCALE)
        assert relative_error(paged_decode(q, pages, later, SCALE), expected) < 1e-5


@pytest.mark.parametrize("nbytes", [1, 2**18])
def test_blocks_are_copied_a_few_at_a_time(nbytes: int, monkeypatch: pytest.MonkeyPatch):
    from qkv_engine.kernels.paged_decode import cpu

    monkeypatch.setattr(cpu, "SCRATCH_NBYTES", nbytes)
    lengths = [500, 130, 7, 300]
    pages, tables = dense_pages(20, 2, 64, torch.float32), block_tables(lengths, 20, order="shuffled")
    q = torch.randn(4, 4, 64)
    plan = DecodePlan.build(locate(tables, lengths), BLOCK_TOKENS)
    expected = paged_decode_reference(q, pages, locate(tables, lengths), SCALE)
    assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


def with_sinks(lengths: list[int]) -> tuple[LayerPages, list[RequestPages]]:
    """Random pages, NaN in slots not owned, and requests with sinks of 32 tokens."""
    sink = 32
    pages = replace(dense_pages(24, 2, 64, torch.float32), sinks=torch.randn(9, 3, 2, 2, sink, 64)[:, 1])
    behind = [max(0, length - sink) for length in lengths]
    tables = block_tables(behind, 24, order="shuffled")
    requests = [
        replace(request, length=length) for request, length in zip(locate(tables, behind), lengths, strict=True)
    ]
    for index, request in enumerate(requests):
        request.sink = 8 - index, min(request.length, sink)
    poison_unused(pages.blocks, tables, float("nan"))
    return pages, requests


@pytest.mark.parametrize(
    ("lengths", "num_groups"),
    [([37], 1), ([190], 1), ([290], 2), ([20], 1), ([1000], 2), ([37, 160, 109, 96], 3), ([5, 32, 33, 500], 3)],
    ids=str,
)
def test_sinks_and_open_blocks_are_attended_side_by_side(lengths: list[int], num_groups: int):
    pages, requests = with_sinks(lengths)
    q = torch.randn(len(lengths), 4, 64)
    plan = DecodePlan.build(requests, BLOCK_TOKENS)
    assert len(plan.groups) == num_groups
    expected = paged_decode_reference(q, pages, requests, SCALE)
    assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


def test_a_plan_lives_on_while_open_blocks_grow():
    pages, requests = with_sinks([500, 40, 159, 32, 20])
    pages.blocks.nan_to_num_(0.5)
    q = torch.randn(len(requests), 4, 64)
    plan = DecodePlan.build(requests, BLOCK_TOKENS)
    grown = [r.open and (r.open[0], min(r.open[1] + 9, BLOCK_TOKENS)) for r in requests]
    later = [
        replace(r, open=o, length=r.length + (o[1] - r.open[1] if o else 0))
        for r, o in zip(requests, grown, strict=True)
    ]
    expected = paged_decode_reference(q, pages, later, SCALE)
    plan = plan.with_lengths([o[1] if o else 0 for o in grown])
    assert relative_error(paged_decode(q, pages, plan, SCALE), expected) < 1e-5


def seen_from(pages: LayerPages, request: RequestPages, first: int) -> RequestPages:
    """The request without the blocks that end before ``first``, which become NaN; all its blocks are dense."""
    kept, positions, ends = [], [], []
    for slot, position in zip(request.full, request.positions.get(0, []), strict=True):
        ends.append((pages.blocks[slot], position + BLOCK_TOKENS))
        if position + BLOCK_TOKENS > first:
            kept.append(slot)
            positions.append(position)
    sink, opened = request.sink, request.open
    if sink is not None and pages.sinks is not None:
        ends.append((pages.sinks[sink[0]], sink[1]))
        sink = sink if sink[1] > first else None
    if opened is not None:
        ends.append((pages.blocks[opened[0]], request.length))
        opened = opened if request.length > first else None
    for block, end in ends:
        if end <= first:
            block.fill_(float("nan"))
    return replace(request, sink=sink, full=kept, open=opened, positions={0: positions})


def placed(requests: list[RequestPages]) -> list[RequestPages]:
    """The requests with the positions of their full blocks."""
    found = []
    for request in requests:
        first = request.length - len(request.full) * BLOCK_TOKENS - (request.open[1] if request.open else 0)
        found.append(replace(request, positions={0: [first + i * BLOCK_TOKENS for i in range(len(request.full))]}))
    return found


@pytest.mark.parametrize("window", [1, 5, 100, 128, 129, 300, 480, 1000])
@pytest.mark.parametrize("lengths", [[37], [190], [290], [1000], [5, 32, 33, 500, 160]], ids=str)
@pytest.mark.parametrize(("softcap", "has_nulls"), [(None, False), (1.5, True)])
def test_decode_sees_its_window(lengths: list[int], window: int, softcap: float | None, has_nulls: bool):
    pages, requests = with_sinks(lengths)
    requests = placed(requests)
    q, nulls = torch.randn(len(lengths), 4, 64), torch.randn(4) if has_nulls else None
    rule = {"softcap": softcap, "null_logits": nulls}
    expected = paged_decode_reference(q, pages, requests, SCALE, window=window, **rule)
    seen = [seen_from(pages, request, request.length - window) for request in requests]
    plan = DecodePlan.build(seen, BLOCK_TOKENS, window)
    assert relative_error(paged_decode(q, pages, plan, SCALE, **rule), expected) < 1e-5


@pytest.mark.parametrize("window", [1, 5, 128, 129, 200, 1000])
@pytest.mark.parametrize("start", [0, 1, 128, 129, 300])
@pytest.mark.parametrize(("softcap", "has_nulls"), [(None, False), (1.5, True)])
def test_prefill_sees_its_window(
    start: int, window: int, softcap: float | None, has_nulls: bool, monkeypatch: pytest.MonkeyPatch
):
    from qkv_engine.kernels import attention_parts
    from qkv_engine.kernels.paged_prefill import cpu

    monkeypatch.setattr(cpu, "WINDOW_QUERIES", 50)
    monkeypatch.setattr(attention_parts, "CAPPED_SCORES", 5000)
    pages = dense_pages(8, 2, 64, torch.float32)
    table = block_tables([start], 8, order="shuffled")[0] if start else []
    past = placed(locate([table], [start]))[0]
    q, nulls = torch.randn(137, 4, 64), torch.randn(4) if has_nulls else None
    k, v = torch.randn(2, 137, 2, 64)
    rule = {"window": window, "softcap": softcap, "null_logits": nulls}
    expected = paged_prefill_reference(q, k, v, pages, past, SCALE, **rule)
    seen = seen_from(pages, past, start + 1 - window)
    assert relative_error(paged_prefill(q, k, v, pages, seen, SCALE, **rule), expected) < 1e-5
    for number in (1, 40):
        found = paged_prefill(q[-number:], k, v, pages, seen, SCALE, **rule)
        assert relative_error(found, expected[-number:]) < 1e-5


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
    for number in (num_tokens, num_tokens - 1, 1):
        found = paged_prefill(q[-number:], k, v, pages, past, SCALE)
        assert relative_error(found, expected[-number:]) < 1e-5


def test_prefill_history_in_pieces_equals_the_reference(monkeypatch: pytest.MonkeyPatch):
    from qkv_engine.kernels.paged_prefill import cpu

    monkeypatch.setattr(cpu, "HISTORY_BLOCKS", 2)
    pages = dense_pages(6, 2, 64, torch.float32)
    past = locate([[4, 0, 5, 1, 2]], [4 * BLOCK_TOKENS + 3])[0]
    q, k, v = torch.randn(9, 4, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    out = paged_prefill(q, k, v, pages, past, SCALE)
    assert relative_error(out, paged_prefill_reference(q, k, v, pages, past, SCALE)) < 1e-5
