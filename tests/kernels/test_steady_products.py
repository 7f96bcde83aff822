"""Products and decode attention whose bits do not depend on what is beside a row, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.kernels.attention_parts import merge_parts, merge_steadily, partial_attention
from qkv_engine.kernels.linear import cpu, linear, linear_swiglu, pack_steadily, padded_rows, steady
from qkv_engine.kernels.linear.steady import (
    MOST_ROWS,
    Columns,
    RowSpan,
    SteadyWeight,
    agreeing_rows,
    by_rows,
    steady_layout,
)
from qkv_engine.kernels.paged_decode import DecodePlan, cut, paged_decode, paged_decode_reference
from qkv_engine.kernels.paged_prefill.triton import pieces_of
from qkv_engine.kernels.request_pages import LayerPages, RequestPages

from .common import BLOCK_TOKENS, block_tables, dense_pages, locate, relative_error

NUMBERS = (1, 2, 3, 7, 16, 33, 127, 128, 129, 200, 300)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALE = 0.11


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("num_out", "size"), [(704, 256), (130, 50), (64, 3000)])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(num_threads, dtype, num_out, size):
    x, matrix, bias = torch.randn(300, size).to(dtype), torch.randn(num_out, size).to(dtype), torch.randn(num_out)
    bias, weight = bias.to(dtype), pack_steadily(matrix)
    whole, gated = linear(x, weight, bias), linear_swiglu(x, weight, bias)
    exact = F.linear(x.double(), matrix.double(), bias.double())
    assert (whole.double() - exact).norm() <= BOUNDS[dtype] * exact.norm()
    assert gated.shape == (300, num_out // 2)
    for number in NUMBERS:
        for first in {0, 1, 300 - number}:
            rows = slice(first, first + number)
            assert torch.equal(linear(x[rows].clone(), weight, bias), whole[rows])
            assert torch.equal(linear_swiglu(x[rows].clone(), weight, bias), gated[rows])


def fake_product(changes_at: set[int], by_place: int | None = None):
    """A product with other bits for some numbers of rows, or for the rows before a place."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x[:, :1] * (1.0 if len(x) in changes_at else 2.0)
        if by_place is not None and len(x) > 1:
            out[:by_place] *= 3.0
        return out

    return product


@pytest.mark.parametrize(
    ("changes_at", "by_place", "span"),
    [
        (set(), None, RowSpan(1, 128)),
        ({1}, None, RowSpan(2, 128)),
        ({1, 2, 3}, None, RowSpan(4, 128)),
        ({96, 128}, None, RowSpan(1, 64)),
        ({64}, None, RowSpan(1, 48)),
        ({1, 128}, None, RowSpan(2, 96)),
        ({1, 3}, None, RowSpan(4, 128)),
        ({1, 3, 24}, None, RowSpan(4, 16)),  # the least that has most: no span has enough rows
        (set(), 1, RowSpan(1, 1)),  # a row's place counts: rows one by one
    ],
)
def test_numbers_of_rows_that_agree(changes_at, by_place, span, monkeypatch):
    monkeypatch.setattr(steady, "_product", fake_product(changes_at, by_place))
    assert agreeing_rows(lambda weight: weight, 3, 5, torch.bfloat16, torch.get_num_threads()) == span


def test_products_keep_to_the_numbers_that_agree(monkeypatch):
    seen = list[int]()

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(steady, "_product", product)
    matrix = torch.randn(4, 6)
    for number in (1, 3, 5, 8, 9, 21):
        x = torch.randn(number, 6)
        out = linear(x, SteadyWeight(matrix, RowSpan(4, 8)))
        assert torch.allclose(out, F.linear(x, matrix), atol=1e-6) and out.shape == (number, 4)
    assert seen and all(4 <= number <= 8 for number in seen)


@pytest.mark.parametrize("changes_at", [{1}, {1, 2}, {1, 128}], ids=str)
def test_small_weights_are_multiplied_by_columns_only_where_that_agrees(changes_at, monkeypatch):
    def product(x: Tensor, weight: object, bias: Tensor | None) -> Tensor:
        is_changed = isinstance(weight, Columns) and len(x) in changes_at
        return x[:, :1] * (1.0 if is_changed else 2.0)

    monkeypatch.setattr(steady, "_product", product)
    monkeypatch.setattr(cpu, "FEW_ROWS", 2)
    weight = torch.randn(9, 16)

    def pack(weight: Tensor) -> SteadyWeight:
        layout, span = steady_layout.__wrapped__(*weight.shape, weight.dtype, torch.get_num_threads())
        return SteadyWeight(layout(weight), span)

    small, large, narrow = pack(weight), pack(weight.repeat(2**13, 1)), pack(weight.bfloat16())
    assert isinstance(small.weight, Columns) == (changes_at == {1})
    assert small.span == RowSpan(2 if changes_at == {1} else 1, 128)
    assert not isinstance(large.weight, Columns) and not isinstance(narrow.weight, Columns)
    monkeypatch.setattr(cpu, "FEW_ROWS", 0)  # where torch's own product is slow
    assert not isinstance(pack(weight).weight, Columns)


def test_torchs_own_product_has_the_same_bits_for_any_number_of_rows(num_threads):
    x, matrix, bias = torch.randn(300, 256), torch.randn(96, 256), torch.randn(96)
    span = agreeing_rows(steady._columns, 96, 256, torch.float32, num_threads)
    weight = SteadyWeight(steady._columns(matrix), span)
    whole = linear(x, weight, bias)
    assert relative_error(whole, F.linear(x.double(), matrix.double(), bias.double()).float()) < 1e-5
    for number in NUMBERS:
        assert torch.equal(linear(x[3 : 3 + number].clone(), weight, bias), whole[3 : 3 + number])


def test_no_row_is_divided_among_threads(monkeypatch):
    monkeypatch.setattr(steady, "DIVIDED_ELEMENTS", 21)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seen = list[int]()

    def double(x: Tensor) -> Tensor:
        seen.append(len(x))
        return 2 * x

    x = torch.randn(9, 5)
    assert torch.equal(by_rows(double, x), 2 * x) and seen == [4, 4, 1]
    assert torch.equal(by_rows(double, x[:4]), 2 * x[:4]) and seen[3:] == [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(by_rows(double, x), 2 * x) and seen[4:] == [9]


def test_the_numbers_that_are_tried_are_those_that_are_computed():
    device = torch.device("cpu")
    assert padded_rows(MOST_ROWS, device) == MOST_ROWS


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 5)])
def test_parts_are_merged_alike(heads):
    for number in (2, 3, 5, 17, 40):
        out, lse = torch.randn(number, 7, *heads, 20), 5 * torch.randn(number, 7, *heads)
        merged, total = merge_steadily(out.clone(), lse)
        assert relative_error(merged, merge_parts(out, lse)) < 1e-6
        assert torch.allclose(total.log() + lse.amax(0), lse.logsumexp(0), atol=1e-5)
        for batch in (1, 3):
            for lacking in (0, 1, 30):
                more = torch.cat((out, out[:1].expand(lacking, -1, -1, -1, -1)))[:, :batch]
                absent = torch.full((lacking, 7, *heads), float("-inf"))
                found = merge_steadily(more.contiguous(), torch.cat((lse, absent))[:, :batch].contiguous())
                assert torch.equal(found[0], merged[:batch]) and torch.equal(found[1], total[:batch])


def placed(tables: list[list[int]], lengths: list[int]) -> list[RequestPages]:
    requests = locate(tables, lengths)
    for request in requests:
        request.positions = {0: [BLOCK_TOKENS * i for i in range(len(request.full))]}
    return requests


def steady_plan(requests: list[RequestPages], sink_tokens: int = 0, window: int | None = None) -> DecodePlan:
    return DecodePlan.build(requests, BLOCK_TOKENS, window, sink_tokens=sink_tokens, unit=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 64), ((2, 2), 80), ((3, 4), 128)])
@pytest.mark.parametrize("window", [None, 150])
def test_attention_has_the_same_bits_alone_and_in_a_crowd_wherever_blocks_lie(dtype, heads, head_dim, window):
    lengths = [300, 1, 129, 512, 77, 256, 900, 127]
    num_kv_heads, group = heads
    pages, tables = dense_pages(24, num_kv_heads, head_dim, dtype), block_tables(lengths, 24, order="shuffled")
    pages.blocks.nan_to_num_(0.5)
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim)
    requests = placed(tables, lengths)
    crowd = paged_decode(q, pages, steady_plan(requests, window=window), SCALE)
    if window is None:
        reference = paged_decode_reference(q, pages, requests, SCALE)
        assert relative_error(crowd, reference) < (1e-5 if dtype is torch.float32 else 1e-2)
    moved = LayerPages(pages.layer, pages.memory, pages.blocks.flip(0), None, pages.layouts)
    for b, request in enumerate(requests):
        found = paged_decode(q[b : b + 1], pages, steady_plan([request], window=window), SCALE)
        assert torch.equal(found, crowd[b : b + 1])
        elsewhere = RequestPages(request.length, positions=request.positions)
        elsewhere.full = [23 - slot for slot in request.full]
        elsewhere.open = request.open and (23 - request.open[0], request.open[1])
        found = paged_decode(q[b : b + 1], moved, steady_plan([elsewhere], window=window), SCALE)
        assert torch.equal(found, crowd[b : b + 1])


def test_a_steady_plan_lives_on_while_open_blocks_grow():
    pages, tables = dense_pages(8, 2, 64, torch.float32), [[2, 0], [1], [5]]
    q = torch.randn(3, 4, 64)
    plan = steady_plan(placed(tables, [137, 5, 60]))
    grown = steady_plan(placed(tables, [137, 90, 127]))
    later = plan.with_lengths([9, 90, 127])
    assert torch.equal(paged_decode(q, pages, later, SCALE), paged_decode(q, pages, grown, SCALE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "head_dim", "num_sink"), [(2, 64, 0), (2, 128, 32), (5, 80, 32)])
def test_hidden_tokens_behind_a_cut_change_no_bit(group, head_dim, num_sink, dtype):
    unit = cut.agreeing_unit((group, head_dim, dtype), num_sink, BLOCK_TOKENS)
    assert BLOCK_TOKENS % unit == 0
    q, k, v = (torch.randn(3, 2, n, head_dim).to(dtype) for n in (group, num_sink + 128, num_sink + 128))
    for num_seen in range(num_sink + 1, num_sink + 128, 9):
        mask = torch.zeros(1, 1, 1, num_sink + 128)
        mask[..., num_seen:] = float("-inf")
        end = num_sink - (num_sink - num_seen) // unit * unit
        whole = partial_attention(q, k, v, scale=SCALE, mask=mask)
        short = partial_attention(q, k[:, :, :end], v[:, :, :end], scale=SCALE, mask=mask[..., :end])
        assert all(map(torch.equal, whole, short)), num_seen


def test_a_cut_that_changes_bits_is_not_made(monkeypatch):
    def attention(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return q + (1e-6 if k.shape[2] == 96 else 0.0), q[..., 0]

    assert cut.agreeing_unit.__wrapped__((2, 16, torch.float32), 0, 128) in (cut.UNIT, 128)
    monkeypatch.setattr(cut, "partial_attention", attention)
    assert cut.agreeing_unit.__wrapped__((2, 16, torch.float32), 0, 128) == 128
    monkeypatch.setattr(cut, "partial_attention", lambda q, k, v, **options: (q, q[..., 0]))
    assert cut.agreeing_unit.__wrapped__((2, 16, torch.float32), 0, 128) == cut.UNIT


@pytest.mark.parametrize(
    ("numbers", "most", "pieces"),
    [
        ([3, 2], 8, [(0, 5)]),
        ([3, 2], 4, [(0, 3), (3, 5)]),
        ([9, 2], 4, [(0, 4), (4, 8), (8, 11)]),
        ([2, 9], 4, [(0, 2), (2, 6), (6, 10), (10, 11)]),
        ([0, 0], 4, []),
        ([4, 4, 1], 4, [(0, 4), (4, 8), (8, 9)]),
    ],
)
def test_a_chunks_blocks_are_divided_by_themselves(numbers, most, pieces):
    assert list(pieces_of(numbers, most)) == pieces
