"""Random cases of every kernel on a GPU: a seed gives shapes, formats and values.

Each case returns its relative error beside the bound for it, or how many values differ beside 0. In the arena and
around every input and output all bytes that nobody wrote are 0xFF, which reads as NaN, and must be so afterwards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine.kernels.delta_net import StateSpec
from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import BlockLayout, PageLayout, PageShape, Side
from qkv_engine.kernels.formats.uniform.layout import AXES, GROUPS, Uniform
from qkv_engine.kernels.linear.triton import MAX_ROWS
from qkv_engine.kernels.moe import SoftmaxOver
from qkv_engine.kernels.moe import codes as moe_codes
from qkv_engine.kernels.moe import triton as moe
from qkv_engine.kernels.paged_prefill import triton as prefill_kernels
from qkv_engine.kernels.seal import seal, seal_reference
from studies.kernels.inputs import dense_page, make_case, named_page, prefill_reference, reference, uniform_page

from ..kernels import (
    block_tables_cases,
    delta_net_cases,
    fused_cases,
    linear_cases,
    moe_cases,
    sample_cases,
    triton_decode_cases,
    triton_prefill_cases,
    window_cases,
)
from ..kernels import (
    linear_codes_cases as codes_cases,
)
from ..kernels import (
    moe_codes_cases as coded,
)
from ..kernels.format_pages import HEAD_DIMS, lay_apart, make_blocks
from ..kernels.graded_cases import graded_sides, layouts
from ..kernels.graded_cases import steps as graded_steps
from .overlapped_cases import decode_overlapped, prefill_overlapped

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, BF16, BF16, FP16, FP32)
BITS = (8, 4, 3, 2, 1)
VOCABULARIES = (1, 130, 4999, 50_257, 151_936)
ROUNDINGS = {BF16: 2.0, FP16: 2.0, FP32: 16.0}

Figure = tuple[float, float]  # error, bound


def decode(seed: int) -> Figure:
    """Single tokens over sinks, open blocks, blocks not begun, and full ones on any rung."""
    rng = random.Random(seed)
    dtype, kv_heads, group, head_dim = rng.choice(DTYPES), rng.choice((1, 2, 3, 8)), rng.randint(1, 16), _head_dim(rng)
    pages = _pages(rng, dtype, kv_heads, head_dim)
    lengths = [rng.choice((1, 31, 128, 129, rng.randint(1, 1500))) for _ in range(rng.randint(1, 8))]
    sink, lookahead = rng.choice((0, 0, 16, 20, 32, 128)), rng.randrange(2)
    case = make_case(
        pages, lengths, group=group, dtype=dtype, sink_tokens=sink, lookahead=lookahead, seed=seed, device=DEVICE
    )
    before, (out, whole) = case.arena.clone(), _fenced(case.q)
    q, _ = _fenced(case.q, case.q)
    work = triton_decode_cases.plan(case, rng.choice((1, 2, 3, 16)))
    work = replace(work, bounds=work.bounds._replace(is_deep=rng.random() < 0.5))
    found = triton_decode_cases.attend(case, work, q, out)
    assert torch.equal(case.arena, before) and _is_untouched(whole, out)
    return _error(found, reference(case, head_dim**-0.5)), _bound(dtype, pages)


def decode_far(seed: int) -> Figure:
    """The same above 5 GiB of arena."""
    pages = [dense_page(BF16, 2, 128), *(uniform_page(bits, 2, 128) for bits in (8, 4, 2))]
    case = make_case(pages, [1, 300, 1500], group=4, sink_tokens=32, base=5 << 30, seed=seed, device=DEVICE)
    found = triton_decode_cases.attend(case, triton_decode_cases.plan(case))
    return _error(found, reference(case, 128**-0.5)), _bound(BF16, pages)


def prefill(seed: int) -> Figure:
    """Ragged chunks, with and without a history, which may stand on any rung and is staged in pieces of any size."""
    rng = random.Random(seed)
    dtype, kv_heads, group, head_dim = rng.choice(DTYPES), rng.choice((1, 2, 3)), rng.randint(1, 16), _head_dim(rng)
    pages = _pages(rng, dtype, kv_heads, head_dim)
    chunks = [
        (rng.choice((0, rng.randint(1, 900))), rng.choice((1, 127, 128, rng.randint(1, 400))))
        for _ in range(rng.randint(1, 5))
    ]
    sink = rng.choice((0, 0, 16, 20, 32, 128))
    case, rows, counts = triton_prefill_cases.build(pages, chunks, group, sink, dtype, seed, DEVICE)
    before, (out, whole) = case.arena.clone(), _fenced(rows)
    q, _ = _fenced(rows, rows)
    with patch.object(prefill_kernels, "STAGED_NBYTES", rng.choice((1, 1 << 20, 256 << 20))):
        found = triton_prefill_cases.attend(case, q, counts, out)
    assert torch.equal(case.arena, before) and _is_untouched(whole, out)
    return _error(found, prefill_reference(case, rows, counts, head_dim**-0.5)), _bound(dtype, pages)


def windows(seed: int) -> Figure:
    """Decode and prefill with any window, soft cap and null logits; blocks before the window hold NaN."""
    rng = random.Random(seed)
    dtype, kv_heads, group, head_dim = rng.choice(DTYPES), rng.choice((1, 2, 3)), rng.randint(1, 16), _head_dim(rng)
    pages, sink = _pages(rng, dtype, kv_heads, head_dim), rng.choice((0, 16, 20, 32, 128))
    window = rng.choice((None, 1, 20, 128, 129, rng.randint(1, 1500)))
    softcap = rng.choice((None, None, 2.0, 30.0))
    nulls = torch.randn(kv_heads * group, device=DEVICE) if rng.random() < 0.3 else None
    if rng.random() < 0.5:
        lengths = [rng.choice((1, 128, rng.randint(1, 1500))) for _ in range(rng.randint(1, 8))]
        case = make_case(pages, lengths, group=group, dtype=dtype, sink_tokens=sink, seed=seed, device=DEVICE)
        return window_cases.decode_error(case, window, softcap, nulls), _bound(dtype, pages)
    chunks = [(rng.randrange(900), rng.choice((1, 128, rng.randint(1, 400)))) for _ in range(rng.randint(1, 4))]
    case, q, counts = triton_prefill_cases.build(pages, chunks, group, sink, dtype, seed, DEVICE)
    return window_cases.prefill_error(case, q, counts, window, softcap, nulls), _bound(dtype, pages)


def page_formats(seed: int) -> Figure:
    """Seal, step down: bytes equal to the references', which run on the CPU; sides in one piece, or codes apart."""
    rng = random.Random(seed)
    dtype, shape = rng.choice(DTYPES), PageShape(rng.randint(1, 3), 128, _head_dim(rng))
    old, new = _steps(rng, shape, dtype, rng.randint(1, 3))
    lay_out = rng.choice((BlockLayout.stack, lay_apart))
    blocks = make_blocks(old, shape, num_blocks=rng.randint(1, 5), dtype=dtype, seed=seed, lay_out=lay_out)
    _make_odd(rng, blocks.x)
    for address, x in zip(blocks.src.tolist(), blocks.x, strict=True):
        blocks.memory[address : address + blocks.source.nbytes] = x.reshape(-1).view(torch.uint8)
    memory, (src, dst, following) = (
        blocks.memory.to(DEVICE),
        (x.to(DEVICE) for x in (blocks.src, blocks.dst, blocks.next)),
    )
    expected, target = seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target), lay_out(new)
    finite = seal(memory, src, dst, blocks.source, blocks.target)
    wrong = int((finite.cpu() != expected).sum()) + int((memory.cpu() != blocks.memory).sum())
    demote_reference(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
    demote(memory, dst, following, blocks.target, target)
    return wrong + int((memory.cpu() != blocks.memory).sum()), 0.0


def norms(seed: int) -> Figure:
    rng = random.Random(seed)
    size, rows, dtype = (
        rng.choice((rng.randint(1, 300), 1024, 4096, rng.randint(1, 16384))),
        rng.randint(1, 70),
        rng.choice(DTYPES),
    )
    with torch.device(DEVICE):
        errors = [case(size, rows, dtype) for case in (fused_cases.rms_norm, fused_cases.add_rms_norm)]
    return max(errors), ROUNDINGS[dtype]


def delta_net(seed: int) -> Figure:
    rng = random.Random(seed)
    heads, group, dtype = rng.randint(1, 4), rng.randint(1, 3), rng.choice((BF16, FP32))
    most = 128 if dtype == FP32 else 256  # products of wider keys in three parts do not fit shared memory
    dims = rng.choice(((128, 128), (rng.randint(1, most), rng.randint(1, 256))))
    spec = StateSpec(heads, heads * group, *dims, conv_width=rng.randint(2, 5))
    number = rng.randint(1, 5)
    starts = [rng.choice((0, rng.randint(1, 900))) for _ in range(number)]
    with torch.device(DEVICE):
        if rng.random() < 0.4:
            positions = [start - rng.randint(0, 1) for start in starts]
            error = delta_net_cases.step(spec, dtype, positions, whole=rng.random() < 0.5)
            return error, 1e-5 if dtype == FP32 else 4e-3
        counts = [rng.choice((1, 64, rng.randint(1, 300))) for _ in range(number)]
        return delta_net_cases.chunks(spec, dtype, starts, counts), 1e-4 if dtype == FP32 else 2e-2


def swiglu(seed: int) -> Figure:
    rng = random.Random(seed)
    dtype = rng.choice(DTYPES)
    with torch.device(DEVICE):
        return fused_cases.swiglu(rng.choice((rng.randint(1, 3000), 14336)), rng.randint(1, 70), dtype), ROUNDINGS[
            dtype
        ]


def gates(seed: int) -> Figure:
    rng = random.Random(seed)
    dtype = rng.choice(DTYPES)
    with torch.device(DEVICE):
        return fused_cases.sigmoid_gate(rng.randint(1, 5000), rng.randint(1, 70), dtype), ROUNDINGS[dtype]


def quantized_products(seed: int) -> Figure:
    """Up to 256 rows, in the launches that the device has, and SwiGLU in the product; more rows are torch's."""
    rng = random.Random(seed)
    bits, num_rows, num_out = rng.choice((4, 4, 8)), rng.randint(2, 256), 2 * rng.randint(1, 3000)
    size, dtype = 128 * rng.randint(1, 40), rng.choice((BF16, FP16))
    group = 128 if bits == 4 and rng.random() < 0.8 else size
    with torch.device(DEVICE):
        weight = codes_cases.integer_weight(num_out, size, bits, group, dtype, zeros=bits == 4 and rng.random() < 0.5)
        weight = codes_cases.with_powers(weight)
        error = codes_cases.product(weight, num_rows, dtype, codes_cases.linear_integer, rng.random() < 0.5)
        return error + 100 * (dtype is BF16 and codes_cases.gated(weight, num_rows)), 1.5


def float8_products(seed: int) -> Figure:
    """Both sides of 8 bits, up to 256 rows, in the launches that the device has."""
    rng = random.Random(seed)
    num_rows, num_out, size = rng.randint(2, 256), 16 * rng.randint(1, 500), 128 * rng.randint(1, 20)
    with torch.device(DEVICE):
        return codes_cases.scaled_rows(num_out, size, num_rows), 1e-2


def products(seed: int) -> Figure:
    """Few rows; SwiGLU in the product, and splits added by a norm, are to have the bits of kernels of their own."""
    rng = random.Random(seed)
    num_rows, size, num_out = rng.randint(1, MAX_ROWS), 8 * rng.randint(1, 2048), rng.randint(1, 5000)
    with torch.device(DEVICE):
        dtype, bias = rng.choice((BF16, FP16)), rng.random() < 0.5
        error = linear_cases.product(num_rows, size, num_out, dtype, bias)
        error += 100 * linear_cases.gated(num_rows, num_out) + 100 * linear_cases.equal_norms(num_rows, dtype, bias)
        return max(error, linear_cases.splits(num_rows, dtype, bias)), 1.5


def experts(seed: int) -> Figure:
    """Routers, plans, and products of any number of tokens: as the engine launches, as others are, or tiny ones."""
    rng = random.Random(seed)
    num, num_rows, dtype = rng.choice((4, 8, 60, 128)), rng.choice((1, 2, 3, 17, 64, 300)), rng.choice(DTYPES)
    top_k, favourites = rng.randint(1, min(num, 8)), rng.choice((None, None, num // 2 + 8))
    favourites = None if favourites is None else min(num, max(favourites, top_k))
    size, inner = (8 * rng.randint(1, n) if rng.random() < 0.8 else rng.randint(1, 300) for n in (300, 120))
    tuning = rng.choice((None, None, None, *moe.TUNINGS.values(), *moe_cases.TUNINGS.values()))
    activation = rng.choice((moe_cases.PLAIN, moe_cases.GPT_OSS))
    with torch.device(DEVICE):
        logits = rng.choice((torch.randn(num_rows, num), moe_cases.odd_logits(9, num)))
        error = moe_cases.routing_error(logits.to(dtype), top_k, rng.choice(list(SoftmaxOver)))
        assert error < 1e-5 and not moe_cases.plan(num_rows, num, top_k, rng.choice((8, 16, 64)), favourites)
        weights = moe_cases.make_experts(num, size, inner, dtype, bias=rng.random() < 0.5, activation=activation)
        error = moe_cases.mlp_error(num_rows, weights, top_k, tuning, favourites=favourites)
    return error, 1e-5 if dtype == FP32 else 4e-3


def coded_experts(seed: int) -> Figure:
    """Quantized experts of every kind, any number of tokens: as the engine launches, as others are, or tiny ones."""
    rng = random.Random(seed)
    kind, num, num_rows = rng.choice(list(coded.KINDS)), rng.choice((4, 8, 32)), rng.choice((1, 2, 3, 17, 64, 300))
    dtype, top_k, bits = rng.choice((BF16, FP16)), rng.randint(1, 4), 4 if "4" in kind.split("/")[0] else 8
    size, inner = (unit * rng.randint(1, 1 + 1500 // unit) for unit in coded.units(kind))
    tuning = rng.choice((None, None, None, *moe_codes.TUNINGS[bits].values(), *coded.TUNINGS.values()))
    activation, favourites = rng.choice((moe_cases.PLAIN, moe_cases.GPT_OSS)), rng.choice((None, None, 4))
    with torch.device(DEVICE):
        weights = coded.make_experts(kind, num, size, inner, dtype, bias=rng.random() < 0.5, activation=activation)
        return coded.mlp_error(num_rows, weights, top_k, tuning, dtype, favourites), 4e-3


def rope_kv_write(seed: int) -> Figure:
    """With and without norm, with and without a basis; pages in the model's dtype or another."""
    rng = random.Random(seed)
    kv_heads, dtype = rng.randint(1, 8), rng.choice(DTYPES)
    stored = rng.choice((dtype, dtype, dtype, BF16, FP32))
    heads, head_dim, tokens = kv_heads * rng.randint(1, 8), rng.choice((*HEAD_DIMS, 6, 10)), rng.randint(7, 50)
    norm, basis = rng.random() < 0.5, rng.random() < 0.5
    with torch.device(DEVICE):
        error = fused_cases.rope_kv_write(heads, kv_heads, head_dim, dtype, stored, norm, tokens, basis)
        error = max(error, fused_cases.cos_sin(head_dim, has_scale=norm))
    return error, 1 + max(ROUNDINGS[dtype], ROUNDINGS[stored])  # norm, weight and rotation each round


def sample(seed: int) -> Figure:
    """Tokens and faults of rows of all kinds."""
    rng = random.Random(seed)
    vocab_size, num_rows = VOCABULARIES[seed % len(VOCABULARIES)], rng.choice((1, 3, 8, 33))
    logits = sample_cases.make_logits(rng, num_rows, vocab_size)
    table = sample_cases.pack(rng, num_rows, vocab_size) if rng.random() < 0.9 else None
    raw_peak = torch.tensor([rng.choice((1.0, 1.0, math.nan, math.inf)) for _ in range(num_rows)])
    return sample_cases.differing(logits, table, raw_peak if rng.random() < 0.3 else None, DEVICE), 0.0


def edits(seed: int) -> Figure:
    """Biases, penalties and bans."""
    return sample_cases.edits(seed, DEVICE), 0.0


def block_tables(seed: int) -> Figure:
    """Updates of the tables, places of tokens, and plans made from them."""
    rng = random.Random(seed)
    with torch.device(DEVICE):
        wrong = block_tables_cases.updates(rng.randint(0, 30))
        wrong += block_tables_cases.places(rng.choice((0, 1, 16, 32, 128)), rng.randint(1, 2000))
        wrong += block_tables_cases.entry_words(rng.randint(1, 400), 3, rng.randint(1, 6))
        batch, num_rungs, split = rng.choice((1, rng.randint(2, 40), 300)), rng.randint(1, 5), rng.choice((1, 2, 4, 16))
        return wrong + block_tables_cases.plan(rng.choice((0, 16, 32, 128)), batch, num_rungs, split), 0.0


CASES: dict[Callable[[int], Figure], int] = {  # and how many seeds are run
    decode: 40,
    decode_overlapped: 30,
    decode_far: 1,
    prefill: 30,
    prefill_overlapped: 30,
    windows: 40,
    page_formats: 24,
    norms: 30,
    swiglu: 30,
    gates: 10,
    quantized_products: 40,
    float8_products: 20,
    delta_net: 40,
    products: 24,
    experts: 40,
    coded_experts: 30,
    rope_kv_write: 24,
    sample: 50,
    edits: 30,
    block_tables: 30,
}


def _head_dim(rng: random.Random) -> int:
    return rng.choice(HEAD_DIMS)


def _pages(rng: random.Random, dtype: torch.dtype, kv_heads: int, head_dim: int) -> list[PageLayout]:
    """Dense pages, and up to three others: uniform, with the widest groups or any; Kitty's; graded; with patterns."""
    pages, number = [dense_page(dtype, kv_heads, head_dim)], rng.randint(1, 255)  # of patterns: requests have one bank
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.2:
            k, v = (f"int{rng.choice(BITS)}-{axis}-128-patterns{number}" for axis in ("channel", "token"))
            pages.append(named_page(k, v, kv_heads, head_dim))
        elif rng.random() < 0.2:
            wide = [f"int{bits}-channel-128" for bits in (8, 4)]
            k, v = (rng.choice((*layouts(head_dim), *wide)) for _ in range(2))
            pages.append(named_page(k, v, kv_heads, head_dim))
        elif rng.random() < 0.5:
            pages.append(uniform_page(rng.choice((8, 4, 2)), kv_heads, head_dim))
        elif rng.random() < 0.4:
            pages.append(named_page(f"kitty-{rng.randint(0, 100)}", "int2-token-128", kv_heads, head_dim))
        else:
            bits, axis, group = (rng.choice(BITS), rng.choice(BITS)), rng.choice(AXES), rng.choice(GROUPS)
            pages.append(uniform_page(bits, kv_heads, head_dim, k_axis=axis, group=group))
    return pages


def _bound(dtype: torch.dtype, pages: Sequence[PageLayout]) -> float:
    """Relative error: the rounding of the output and of p, and where there are codes that of q and p in 16 bits."""
    if dtype == FP32:
        return 1e-5 if len(pages) == 1 else 1e-3
    return 3e-3 if dtype == BF16 else 1e-3


def _steps(
    rng: random.Random, shape: PageShape, dtype: torch.dtype, number: int
) -> tuple[tuple[Side, ...], tuple[Side, ...]]:
    """Sides of a layout and of one that it may step down to, 3 bits to 3 bits alone, some to graded ones."""
    old: list[Side] = []
    new: list[Side] = []
    for _ in range(number):
        if rng.random() < 0.25:
            before, after = rng.choice(graded_steps(graded_sides(shape.head_dim, shape.num_kv_heads)))
            old.append(before)
            new.append(after)
            continue
        bits, axis, group, side = rng.choice(BITS), rng.choice(AXES), rng.choice(GROUPS), rng.choice(("k", "v"))
        lower = rng.choice([b for b in (8, 4, 2, 1) if b <= bits]) if bits != 3 else 3
        old.append(Uniform(bits, axis, group).layout(shape, side))
        new.append(Uniform(lower, axis, group).layout(shape, side))
    return tuple(old), tuple(new)


def _make_odd(rng: random.Random, x: Tensor) -> None:
    """Writes what quantizers trip over into some blocks: NaN, infinity, -0, no range, and ranges at fp16's ends."""
    for block in x:
        if rng.random() < 0.5:
            side, head = block[rng.randrange(len(block))], rng.randrange(x.shape[2])
            side[head, rng.randrange(128)] = rng.choice((-0.0, 60000.0, 1e-7, 1e-30))
            side[head, :, rng.randrange(x.shape[4])] = 0.123
        if rng.random() < 0.3:
            block[-1, 0, 3, 2] = rng.choice((math.nan, math.inf, -math.inf))


def _fenced(like: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Room for a tensor [N, H, D] like ``like``, with ``values`` if there are any, in a wider one of NaN; and that."""
    n, heads, head_dim = like.shape
    nbytes = (n + 2) * (heads + 1) * head_dim * like.dtype.itemsize
    whole = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=like.device)
    inner = whole.view(like.dtype).view(n + 2, heads + 1, head_dim)[1:-1, :heads]
    return (inner if values is None else inner.copy_(values)), whole


def _is_untouched(whole: Tensor, inner: Tensor) -> bool:
    """Whether all of ``whole`` but ``inner`` is 0xFF."""
    n, heads, head_dim = inner.shape
    around = whole.clone().view(inner.dtype).view(n + 2, heads + 1, head_dim)
    around[1:-1, :heads] = math.nan
    return bool(around.isnan().all()) and bool((whole.view(n + 2, -1)[[0, -1]] == 0xFF).all())


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
