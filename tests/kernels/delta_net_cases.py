"""Cases of the gated delta-net for Triton's interpreter: errors against the token by token reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv_engine.kernels.delta_net import DeltaWeights, StateSpec, StateViews, narrow_states, reference, triton
from qkv_engine.kernels.delta_net.formats import FLOAT32, INT8, INT16, StateFormat, decode, encode, narrow
from qkv_engine.kernels.delta_net.plan import ChunkWork, StepWork
from qkv_engine.table_words import RUNG_BITS

from .common import relative_error
from .interpreted import report

SPECS = {
    "odd": StateSpec(num_k_heads=1, num_v_heads=3, k_dim=20, v_dim=35, conv_width=4),
    "grouped": StateSpec(num_k_heads=2, num_v_heads=4, k_dim=32, v_dim=16, conv_width=3),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAN_BYTE = 0xFF  # every float of 0xFF bytes is a NaN
GAP = 256  # bytes between slots, which nobody writes


class Arena:
    """States of some requests in two layers, far apart in bytes that are NaN: where they are, and their values.

    Where there are narrower formats requests have them by turns.
    """

    def __init__(self, spec: StateSpec, dtype: torch.dtype, number: int):
        self.spec, self.dtype = spec, dtype
        self.steps = torch.arange(number) % len(spec.forms)
        size = spec.nbytes(dtype) + GAP
        self.memory = torch.full((2 * number * size + GAP,), NAN_BYTE, dtype=torch.uint8)
        order = torch.randperm(2 * number)
        self.addresses = (order * size + GAP).view(2, number)
        self.words = self.addresses << RUNG_BITS | self.steps

    def form(self, request: int) -> StateSpec:
        """A request's format."""
        return self.spec.forms[int(self.steps[request])]

    def views(self, layer: int, request: int) -> StateViews:
        """A state in the arena."""
        start, form = int(self.addresses[layer, request]), self.form(request)
        return StateViews.of(self.memory[start : start + form.nbytes(self.dtype)], form, self.dtype)

    def state(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Values of recurrent [HV, DK, DV] float32 and conv [C, W - 1]."""
        views = self.views(layer, request)
        return decode(views.recurrent), views.conv

    def num_written(self) -> int:
        """Bytes that hold something."""
        return int((self.memory != NAN_BYTE).sum())


def make_weights(spec: StateSpec, dtype: torch.dtype) -> DeltaWeights:
    conv = (torch.randn(spec.num_channels, spec.conv_width) / 2).to(dtype)
    decay, dt_bias = torch.rand(spec.num_v_heads) * 2, torch.randn(spec.num_v_heads)
    return DeltaWeights(spec, conv, decay, dt_bias, (1 + torch.randn(spec.v_dim) / 4).to(dtype), 1e-6)


def make_rows(spec: StateSpec, dtype: torch.dtype, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, z, b and a of tokens: columns of wider rows, the others NaN."""
    values = spec.num_v_heads * spec.v_dim
    rows = torch.full((number, spec.num_channels + values + 7), torch.nan, dtype=dtype)
    rows[:, :-7] = torch.randn(number, spec.num_channels + values)
    qkv, z, _ = rows.split((spec.num_channels, values, 7), dim=1)
    gates = torch.randn(number, 2 * spec.num_v_heads).to(dtype)
    return qkv, z.unflatten(1, (spec.num_v_heads, spec.v_dim)), *gates.chunk(2, dim=1)


def plain(
    weights: DeltaWeights, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, recurrent: Tensor, conv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and both states by the reference."""
    mixed, conv = reference.short_conv(qkv, conv, weights.conv)
    gates = reference.gates(b, a, weights.decay, weights.dt_bias)
    out, recurrent = reference.delta_rule(*weights.spec.split(mixed), *gates, recurrent)
    return reference.gated_rms_norm(out, z, weights.norm, weights.eps), recurrent, conv


def begin(arena: Arena, layer: int, request: int, is_first: bool) -> tuple[Tensor, Tensor]:
    """The state of a request: zeros where NaN is stored before its first token, else random values, stored as well."""
    spec, views = arena.spec, arena.views(layer, request)
    if is_first:
        return torch.zeros(spec.recurrent_shape), torch.zeros(spec.conv_shape, dtype=arena.dtype)
    stored = encode(torch.randn(spec.recurrent_shape), arena.form(request).format)
    for target, source in zip(views.parts(), StateViews(stored, torch.randn(spec.conv_shape)).parts(), strict=True):
        target.copy_(source)
    recurrent, conv = arena.state(layer, request)
    return recurrent.clone(), conv.clone()


def states(arena: Arena, layer: int, request: int, expected: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a state found and expected. Codes may be one off: sums differ in their last bits."""
    recurrent, conv = arena.state(layer, request)
    fmt = arena.form(request).format
    if not fmt.has_scales:
        return [(recurrent, expected[0]), (conv, expected[1])]
    found, wanted = arena.views(layer, request).recurrent, encode(expected[0], fmt)
    assert found.scales is not None and wanted.scales is not None
    if arena.dtype is torch.float32:
        off = (found.elements.int() - wanted.elements.int()).abs()
        assert off.max() <= (1 if fmt is INT8 else 3) and (off > 0).sum() <= 1 + off.numel() // 8
    return [(found.scales, wanted.scales), (conv, expected[1])]


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    return max(relative_error(found, expected) for found, expected in pairs)


def step(spec: StateSpec, dtype: torch.dtype, positions: list[int], *, whole: bool = False) -> float:
    """``whole``: programs have whole heads, if they may."""
    torch.manual_seed(len(positions))
    arena, weights, layer = Arena(spec, dtype, len(positions)), make_weights(spec, dtype), 1
    rows = make_rows(spec, dtype, len(positions))
    begun = [begin(arena, layer, i, position <= 0) for i, position in enumerate(positions)]
    out = torch.full((len(positions), spec.num_v_heads, spec.v_dim), torch.nan, dtype=dtype)
    work = StepWork(arena.words, torch.tensor(positions, dtype=torch.int32) + 1)
    had = arena.num_written()
    with patch.object(triton, "WHOLE_HEADS", 1 if whole else 2**30):
        triton.delta_net_step_triton(arena.memory, *rows, weights, work, layer, out)
    pairs = []
    for i, position in enumerate(positions):
        if position < 0:  # padding: zeros, and its slot stays as it is
            start = int(arena.addresses[layer, i])
            assert not out[i].any() and (arena.memory[start : start + spec.nbytes(dtype)] == NAN_BYTE).all()
            continue
        expected, *state = plain(weights, *(x[i : i + 1] for x in rows), *begun[i])
        pairs += [(out[i : i + 1], expected), *states(arena, layer, i, tuple(state))]
    assert arena.num_written() > had or all(position for position in positions)
    return worst(pairs)


def chunks(
    spec: StateSpec, dtype: torch.dtype, starts: list[int], counts: list[int], padding: tuple[int, int, int] = (0, 0, 0)
) -> float:
    """``padding``: rows, items and chunks of it."""
    torch.manual_seed(sum(counts))
    arena, weights, layer = Arena(spec, dtype, len(starts)), make_weights(spec, dtype), 1
    rows = make_rows(spec, dtype, sum(counts) + padding[0])
    begun = [begin(arena, layer, i, not start) for i, start in enumerate(starts)]
    out = torch.full((sum(counts) + padding[0], spec.num_v_heads, spec.v_dim), torch.nan, dtype=dtype)
    work = padded(ChunkWork.build(arena.words.T.tolist(), starts, counts), *padding[1:]).to(out.device)
    before = arena.memory[:GAP].clone()
    triton.delta_net_chunk_triton(arena.memory, *rows, weights, work, layer, out)
    assert torch.equal(arena.memory[:GAP], before)  # where words of padding point to
    pairs, row = [], 0
    for i, count in enumerate(counts):
        part = slice(row, row + count)
        expected, *state = plain(weights, *(x[part] for x in rows), *begun[i])
        pairs += [(out[part], expected), *states(arena, layer, i, tuple(state))]
        row += count
    return worst(pairs)


def padded(work: ChunkWork, num_items: int, num_chunks: int) -> ChunkWork:
    """``work`` with so many more items and chunks, without tokens."""
    words, items, chunks = pad(work.words, (0, num_items)), pad(work.items, (0, 0, 0, num_items)), work.chunks
    items[len(work.items) :, 2] = 1
    return ChunkWork(words, items, pad(chunks, (0, 0, 0, num_chunks)))


def narrowing(spec: StateSpec, dtype: torch.dtype, old: StateFormat, new: StateFormat, bad: float = 1.0) -> float:
    """States rewritten in a narrower format: every byte as the plain form has it, no other byte touched.

    A ``bad`` element of one of them is told.
    """
    torch.manual_seed(0)
    source, target = (Arena(spec._replace(format=fmt), dtype, 3) for fmt in (old, new))
    for i in range(3):
        begin(source, 1, i, is_first=False)
    views = source.views(1, 0).recurrent
    views.elements[0, :, 0] = 0  # a column of zeros
    behind = len(source.memory)
    memory, dst = torch.cat((source.memory, target.memory)), target.addresses[1] + behind
    finite = torch.ones(3, dtype=torch.int64)
    if not old.has_scales:
        source.views(1, 2).recurrent.elements[-1, -1, -1] = bad
        memory = torch.cat((source.memory, target.memory))
    triton.narrow_states_triton(memory, source.addresses[1], dst, source.spec, new, dtype, finite)
    assert finite.tolist() == [1, 1, int(old.has_scales or bad == 1.0)]
    plain_memory, plain_finite = torch.cat((source.memory, target.memory)), torch.ones(3, dtype=torch.int64)
    narrow_states(plain_memory, source.addresses[1], dst, source.spec, new, dtype, plain_finite)
    assert torch.equal(plain_finite, finite)
    if (
        bad != 1.0 and not old.has_scales
    ):  # codes of a column that is not finite mean nothing, but its scale is not, either
        views = StateViews.of(memory[int(dst[2]) :][: target.spec.nbytes(dtype)], target.spec, dtype)
        assert views.recurrent.scales is not None and not views.recurrent.scales[-1, -1].isfinite()
        return 0.0
    assert torch.equal(memory, plain_memory)
    for i in range(3):
        stored, conv = source.views(1, i)
        for view, part in zip(
            target.views(1, i).parts(), StateViews(narrow(stored, old, new), conv).parts(), strict=True
        ):
            view.copy_(part)
    assert torch.equal(memory[:behind], source.memory) and torch.equal(memory[behind:], target.memory)
    return 0.0


def norm(dtype: torch.dtype, num_tokens: int, heads: int, size: int) -> float:
    torch.manual_seed(size)
    wide = torch.full((num_tokens, heads * size + 5), torch.nan, dtype=dtype)
    wide[:, : heads * size] = torch.randn(num_tokens, heads * size)
    x, z = torch.randn(num_tokens, heads, size).to(dtype), wide[:, : heads * size].unflatten(1, (heads, size))
    weight = (1 + torch.randn(size) / 4).to(dtype)
    expected, found = reference.gated_rms_norm(x, z, weight, 1e-6), torch.full_like(x, torch.nan)
    for out in (found, x):  # another tensor, or x itself
        triton.gated_rms_norm_triton(x, z, weight, 1e-6, out)
    assert torch.equal(found, x)
    return relative_error(found, expected)


def forms(spec: StateSpec, dtype: torch.dtype) -> float:
    """A step by programs of whole heads against one by programs of parts of them: outputs and every state."""
    torch.manual_seed(0)
    positions = [5, 0, -1, 9]
    weights, rows = make_weights(spec, dtype), make_rows(spec, dtype, len(positions))
    arena, lengths = Arena(spec, dtype, len(positions)), torch.tensor(positions, dtype=torch.int32) + 1
    for i, position in enumerate(positions):
        begin(arena, 1, i, position <= 0)
    found, memory = [], arena.memory
    for whole_heads in (1, 2**30):
        arena.memory, out = memory.clone(), torch.full(rows[1].shape, torch.nan, dtype=dtype)
        with patch.object(triton, "WHOLE_HEADS", whole_heads):
            triton.delta_net_step_triton(arena.memory, *rows, weights, StepWork(arena.words, lengths), 1, out)
        assert not out[2].any()
        found.append([out, *(part for i in (0, 1, 3) for part in arena.state(1, i))])
    return worst(list(zip(*found, strict=True)))


def cases() -> dict[str, Callable[[], float]]:
    """Every case by name."""
    found: dict[str, Callable[[], float]] = {}
    for kind, spec in SPECS.items():
        for name, dtype in DTYPES.items():
            for positions, whole in product(([5], [0, 7, -1, 0, 31]), (False, True)):
                found[f"step {kind} {name} {positions}{' whole' * whole}"] = (
                    lambda s=spec, d=dtype, p=positions, w=whole: step(s, d, p, whole=w)
                )
            for starts, counts in (([0], [1]), ([9], [65]), ([0, 3, 0, 70], [2, 64, 131, 1])):
                found[f"chunks {kind} {name} {starts} {counts}"] = lambda s=spec, d=dtype, a=starts, b=counts: chunks(
                    s, d, a, b
                )
    for fmt in (INT16, INT8):
        for kind, name, positions in (("odd", "fp32", [0, 7, -1, 31]), ("grouped", "bf16", [3])):
            spec = SPECS[kind]._replace(format=fmt)
            for whole in (False, True):
                found[f"step {kind} {name} {fmt.name}{' whole' * whole}"] = (
                    lambda s=spec, d=DTYPES[name], p=positions, w=whole: step(s, d, p, whole=w)
                )
        for kind, name, starts, counts in (("odd", "fp32", [0, 3, 70], [2, 64, 131]), ("grouped", "bf16", [9], [65])):
            spec = SPECS[kind]._replace(format=fmt)
            found[f"chunks {kind} {name} {fmt.name}"] = lambda s=spec, d=DTYPES[name], a=starts, b=counts: chunks(
                s, d, a, b, (7, 2, 1)
            )
    for old, new in ((FLOAT32, INT16), (FLOAT32, INT8), (INT16, INT8)):
        for kind, dtype in (("odd", torch.float32), ("grouped", torch.bfloat16)):
            found[f"narrow {kind} {old.name} {new.name}"] = lambda s=SPECS[kind], d=dtype, o=old, n=new: narrowing(
                s, d, o, n
            )
    for bad in (torch.nan, -torch.inf):
        found[f"narrow a state with {bad}"] = lambda x=bad: narrowing(SPECS["odd"], torch.float32, FLOAT32, INT16, x)
    for narrower in ((INT16,), (INT16, INT8)):
        for kind, name in (("odd", "fp32"), ("grouped", "bf16")):
            spec, d = SPECS[kind]._replace(narrower=narrower), DTYPES[name]
            for whole in (False, True):
                found[f"step {kind} {name} mixed {len(narrower)}{' whole' * whole}"] = lambda s=spec, d=d, w=whole: (
                    step(s, d, [0, 7, -1, 31, 5, 0, 9], whole=w)
                )
            found[f"chunks {kind} {name} mixed {len(narrower)}"] = lambda s=spec, d=d: chunks(
                s, d, [0, 3, 70, 0], [2, 64, 131, 1], (3, 1, 2)
            )
    whole = StateSpec(num_k_heads=4, num_v_heads=8, k_dim=128, v_dim=128, conv_width=4)  # whole tiles
    for name, dtype in DTYPES.items():
        found[f"chunks whole {name}"] = lambda d=dtype: chunks(whole, d, [3, 0], [70, 9], (1, 1, 1))
        found[f"norm {name}"] = lambda d=dtype: norm(d, 9, 3, 35)
        for size, fmt in ((24, FLOAT32), (80, FLOAT32), (80, INT16), (80, INT8)):
            spec = StateSpec(num_k_heads=1, num_v_heads=2, k_dim=20, v_dim=size, conv_width=4, format=fmt)
            found[f"forms of {size} columns {fmt.name} {name}"] = lambda s=spec, d=dtype: forms(s, d)
    return found


if __name__ == "__main__":
    report(cases())
