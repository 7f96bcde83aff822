"""Random paged KV for kernel tests and benchmarks: an arena of page bytes and the values that the bytes stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.attention_reference import softmax_weights
from qkv_engine.kernels.formats import BlockLayout, PageLayout, PageShape, Place, Side, make_format
from qkv_engine.kernels.formats.dense import DenseSide
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform.layout import Axis

T = 128
SIDES: tuple[SideName, SideName] = ("k", "v")
POISON = 0xFF  # a NaN in bf16, fp16 and fp32, the largest code
ALIGN = 128
# Patterns, KV heads, query heads a KV head and head dim of pages that are compiled and checked.
PATTERN_SHAPES = ((32, 8, 4, 128), (64, 2, 8, 128), (33, 3, 7, 80), (255, 2, 1, 64), (3, 1, 4, 256))


class Address(NamedTuple):
    """Bytes from the start of the arena to a slot and to the bank of its request."""

    slot: int
    bank: int


@dataclass(frozen=True)
class Case:
    """Requests over paged KV. ``k`` and ``v`` hold each request's values as [length, H, D] float32.

    ``banks`` [B] int64: addresses of the requests' patterns, ``None`` for pages without patterns.
    """

    q: Tensor
    arena: Tensor
    addresses: Tensor
    rungs: Tensor
    lengths: Tensor
    pages: list[PageLayout]
    k: list[Tensor]
    v: list[Tensor]
    num_kv_heads: int
    sink_tokens: int
    banks: Tensor | None = None


def dense_page(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> PageLayout:
    """A page of elements of ``dtype`` on both sides."""
    shape = PageShape(num_kv_heads, T, head_dim)
    return BlockLayout.stack([DenseSide("k", shape, dtype), DenseSide("v", shape, dtype)]).pages[0]


def uniform_page(
    num_bits: int | tuple[int, int],
    num_kv_heads: int,
    head_dim: int,
    *,
    k_axis: Axis = "channel",
    group: int = 128,
) -> PageLayout:
    """A page of uniform codes; ``num_bits`` of both sides or of K and V."""
    k_bits, v_bits = (num_bits, num_bits) if isinstance(num_bits, int) else num_bits
    shape = PageShape(num_kv_heads, T, head_dim)
    k = Uniform(k_bits, k_axis, group).layout(shape, "k")
    v = Uniform(v_bits, "token", group).layout(shape, "v")
    return BlockLayout.stack([k, v]).pages[0]


def named_page(k: str, v: str, num_kv_heads: int, head_dim: int) -> PageLayout:
    """A page whose sides are in the formats of these names."""
    shape = PageShape(num_kv_heads, T, head_dim)
    formats = (make_format(name, torch.bfloat16) for name in (k, v))
    return BlockLayout.stack(fmt.layout(shape, side) for fmt, side in zip(formats, SIDES, strict=True)).pages[0]


def shared_page(k: str, v: str, num_kv_heads: int, head_dim: int) -> PageLayout:
    """The upper page of two layers in these formats whose V has the codes of the lower one, beyond its own bytes."""
    shape = PageShape(num_kv_heads, T, head_dim)
    names = (k, v, k, f"{v}-subordinate")
    formats = (make_format(name, torch.bfloat16) for name in names)
    return BlockLayout.stack(fmt.layout(shape, side) for fmt, side in zip(formats, SIDES * 2, strict=True)).pages[1]


def make_case(
    pages: Sequence[PageLayout],
    lengths: Sequence[int],
    *,
    group: int,
    dtype: torch.dtype = torch.bfloat16,
    sink_tokens: int = 0,
    num_layers: int = 2,
    lookahead: int = 0,
    dense_from: Sequence[int] | None = None,
    demote_all: bool = False,
    base: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Requests of ``lengths`` tokens, their full blocks on random rungs of ``pages`` (rung 0: dense, open blocks too).

    Attention reads the last of ``num_layers`` equal layers. Slots lie in random order from byte ``base`` on, every
    byte not written is ``POISON``, and ``lookahead`` blocks beyond the last are in the tables but not written at
    all. Blocks with tokens from position ``dense_from[b]`` on stay on rung 0; with ``demote_all`` the others stand
    on the last. A request's pages with patterns have one bank, and its tokens lie around those of the last page.
    """
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads, head_dim = pages[0].k.shape.num_kv_heads, pages[0].k.shape.head_dim
    spans = [_block_spans(n, sink_tokens, lookahead) for n in lengths]
    width = max(map(len, spans))
    addresses = torch.zeros(len(lengths), width, dtype=torch.int64)
    rungs = torch.full((len(lengths), width), -1)
    unit = ALIGN * head_dim  # dense slots lie at whole rows of D elements
    placed = [_in_layer(p, num_layers - 1) for p in pages]
    slot = (max(p.span[1] for p in placed) // unit + 1) * unit
    total = sum(map(len, spans))
    supply = iter(torch.randperm(total + 1, generator=generator).tolist())
    bank = num_layers * max(p.k.bank_nbytes + p.v.bank_nbytes for p in pages)
    first_bank = base + slot * (total + 1)
    arena = torch.full((first_bank + bank * len(lengths),), POISON, dtype=torch.uint8, device=device)
    banks = first_bank + bank * torch.arange(len(lengths)) if bank else None
    keys, values = [], []
    for b, blocks in enumerate(spans):
        k = torch.randn(lengths[b], num_kv_heads, head_dim, generator=generator)
        v = torch.randn(lengths[b], num_kv_heads, head_dim, generator=generator) + 0.5
        for page in placed:
            k = write_patterns(arena, first_bank + b * bank + page.k_bank, page.k, k, generator)
            v = write_patterns(arena, first_bank + b * bank + page.v_bank, page.v, v, generator)
        for i, (first, last, capacity) in enumerate(blocks):
            is_sink = sink_tokens > 0 and i == 0
            full = not is_sink and last - first == T and (not dense_from or last <= dense_from[b])
            rung = int(torch.randint(len(pages), (1,), generator=generator)) if full else 0
            rung = len(pages) - 1 if full and demote_all else rung
            address = base + slot * next(supply)
            place = Address(address, first_bank + b * bank)
            addresses[b, i], rungs[b, i] = address, rung
            for x, which in ((k, "k"), (v, "v")):
                tokens = x[first:last].transpose(0, 1)
                x[first:last] = _write(arena, place, placed[rung], which, tokens, capacity)
        keys.append(k.to(device))
        values.append(v.to(device))
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=generator).to(device, dtype)
    return Case(
        q,
        arena,
        addresses.to(device),
        rungs.to(device),
        torch.tensor(list(lengths), device=device),
        placed,
        keys,
        values,
        num_kv_heads,
        sink_tokens,
        None if banks is None else banks.to(device),
    )


def _block_spans(length: int, sink_tokens: int, lookahead: int) -> list[tuple[int, int, int]]:
    """First token, token after the last and capacity of a request's blocks, the sink first."""
    spans = [(0, min(length, sink_tokens), sink_tokens)] if sink_tokens else []
    starts = range(sink_tokens, max(length, sink_tokens) + lookahead * T, T)
    return spans + [(min(s, length), min(s + T, length), T) for s in starts]


def _in_layer(page: PageLayout, layer: int) -> PageLayout:
    start = layer * (page.k.nbytes + page.v.nbytes)
    k, v = (Place(start + place.codes, start + place.meta) for place in (page.k_place, page.v_place))
    bank = layer * (page.k.bank_nbytes + page.v.bank_nbytes)
    return PageLayout(page.k, page.v, k, v, bank, bank + page.k.bank_nbytes)


def pattern_page(bits: int, number: int, heads: int, head_dim: int, group: int = T) -> PageLayout:
    """K per channel and V per token beside ``number`` patterns a request."""
    k, v = (f"int{bits}-{axis}-{group}-patterns{number}" for axis in ("channel", "token"))
    return named_page(k, v, heads, head_dim)


def write_patterns(arena: Tensor, at: int, side: Side, x: Tensor, generator: torch.Generator) -> Tensor:
    """Random patterns of a side at an address; returns tokens ``x`` [n, H, D] gathered around them, as for others."""
    if not side.bank_nbytes:
        return x
    heads, head_dim = side.shape.num_kv_heads, side.shape.head_dim
    patterns = torch.randn(side.num_patterns, heads, head_dim, generator=generator).half()
    bank = torch.zeros(side.bank_nbytes, dtype=torch.uint8)
    bank[: patterns.nbytes] = patterns.flatten().view(torch.uint8)
    arena[at : at + side.bank_nbytes] = bank.to(arena.device)
    index = torch.randint(side.num_patterns, x.shape[:2], generator=generator)
    return 0.3 * x + patterns[index, torch.arange(heads)]


def _write(arena: Tensor, at: Address, page: PageLayout, which: str, x: Tensor, capacity: int) -> Tensor:
    """Writes tokens ``x`` [H, n, D] at the start of a side of a slot; returns the values stored, [n, H, D]."""
    side, place = (page.k, page.k_place) if which == "k" else (page.v, page.v_place)
    address = at.slot
    if side.dense_dtype is not None:
        stored, first = x.to(side.dense_dtype), address + place.codes // T * capacity
        elements = arena[first : first + side.nbytes // T * capacity].view(side.dense_dtype)
        elements.view(len(x), capacity, -1)[:, : x.shape[1]] = stored.to(arena.device)
        return stored.float().transpose(0, 1)
    bank = None
    if side.bank_nbytes:
        first = at.bank + (page.k_bank if which == "k" else page.v_bank)
        bank = arena[None, first : first + side.bank_nbytes].to(x.device)
    rows = side.family.quantize(x[None], side, bank)
    for found, offset in zip(rows[:2], place, strict=True):
        arena[address + offset : address + offset + found.shape[1]] = found[0].to(arena.device)
    return side.family.dequantize(rows._replace(bank=bank), side)[0].transpose(0, 1)


def reference(case: Case, scale: float, q: Tensor | None = None, **rule: Any) -> Tensor:
    """Attention of each request's query over its values, in float32; ``rule``: keywords of ``softmax_weights``."""
    return prefill_reference(case, case.q if q is None else q, [1] * len(case.k), scale, **rule)


def prefill_reference(case: Case, q: Tensor, counts: Sequence[int], scale: float, **rule: Any) -> Tensor:
    """Attention of the last ``counts[b]`` tokens of each request, whose queries ``q`` holds in order, in float32.

    ``rule``: keywords of ``softmax_weights``.
    """
    parts = []
    for k, v, rows in zip(case.k, case.v, torch.split(q.float(), list(counts)), strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = softmax_weights(scale * torch.einsum("nhd,thd->hnt", rows, k), **rule)
        parts.append(torch.einsum("hnt,thd->nhd", weights, v))
    return torch.cat(parts)
