"""Cases of the small fused kernels for Triton's interpreter: the largest error in roundings of the dtype."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine.kernels.cos_sin.reference import cos_sin_reference
from qkv_engine.kernels.cos_sin.triton import cos_sin_triton
from qkv_engine.kernels.rms_norm import reference as rms_norm_reference
from qkv_engine.kernels.rms_norm.triton import rms_norm_triton
from qkv_engine.kernels.rope_kv_write import KeyBasis, rope_kv_write_reference
from qkv_engine.kernels.rope_kv_write.basis_triton import TILE_TOKENS, rope_basis_kv_write_triton
from qkv_engine.kernels.rope_kv_write.triton import rope_kv_write_triton
from qkv_engine.kernels.sigmoid_gate.triton import sigmoid_gate_triton
from qkv_engine.kernels.swiglu import reference as swiglu_reference
from qkv_engine.kernels.swiglu.triton import swiglu_triton
from qkv_engine.models.rope import RopeConfig, RotaryEmbedding
from studies.kernels.token_rows import token_rows

from .interpreted import report

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYERS, SINK, BLOCK = 3, 4, 16  # tokens
NAN_BYTE = 0xFF  # every float of 0xFF bytes is a NaN


def roundings(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference in units of the dtype's relative rounding of ``expected``, or of ``scale``.

    At 16 bits all but a few values must be equal: sums that differ in their last float32 bit rarely round differently,
    while a missing rounding in between often shows.
    """
    if expected.dtype.itemsize == 2 and int((found != expected).sum()) > max(1, expected.numel() // 50):
        return float("inf")
    scale = expected if scale is None else scale
    unit = torch.finfo(expected.dtype).eps * scale.abs().double().clamp(min=torch.finfo(expected.dtype).tiny)
    return float(((found.double() - expected.double()).abs() / unit).max())


def fenced(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random rows, and the buffer of NaNs in whose middle they lie."""
    buffer = torch.full((shape[0] + 2, *shape[1:]), float("nan"), dtype=dtype)
    buffer[1:-1] = torch.randn(shape)
    return buffer[1:-1], buffer


def untouched(buffer: Tensor) -> bool:
    return bool(buffer[[0, -1]].isnan().all())


def rms_norm(size: int, num_rows: int, dtype: torch.dtype) -> float:
    x, _ = fenced(num_rows, size, dtype=dtype)
    weight = (1 + torch.randn(size) / 4).to(dtype)
    x[0] *= 0  # a row of which eps is all
    return roundings(rms_norm_triton(x, None, weight, 1e-5), rms_norm_reference.rms_norm(x, weight, 1e-5))


def add_rms_norm(size: int, num_rows: int, dtype: torch.dtype) -> float:
    x, _ = fenced(num_rows, size, dtype=dtype)
    residual, buffer = fenced(num_rows, size, dtype=dtype)
    weight = (1 + torch.randn(size) / 4).to(dtype)
    expected_residual = residual.clone()
    expected = rms_norm_reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    found = rms_norm_triton(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual) and untouched(buffer)
    return roundings(found, expected)


def swiglu(inner: int, num_rows: int, dtype: torch.dtype) -> float:
    gate_up, _ = fenced(num_rows, 2 * inner, dtype=dtype)
    gate_up *= 4
    return roundings(swiglu_triton(gate_up), swiglu_reference.swiglu(gate_up))


def sigmoid_gate(inner: int, num_rows: int, dtype: torch.dtype) -> float:
    """The sigmoid is rounded once, and the product; the gate is a part of longer rows."""
    x, gate = fenced(num_rows, inner, dtype=dtype)[0], fenced(num_rows, inner + 8, dtype=dtype)[0] * 4
    gate[:, inner:] = float("nan")
    gate = gate[:, :inner]
    with patch.object(torch, "empty_like", lambda like: torch.full_like(like, float("nan"))):
        return roundings(sigmoid_gate_triton(x, gate), x * gate.sigmoid())


def swiglu_extremes() -> float:
    gate_up = torch.tensor([[-1e4, 1e4, float("inf"), 1.0, 1.0, 2.0, 3.0, float("nan")]])
    found, expected = swiglu_triton(gate_up), swiglu_reference.swiglu(gate_up)
    return float(not torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)))


def places(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of two requests, and (request, position) of tokens that go to sinks, to blocks and nowhere, none twice.

    Shapes:  addresses [2, 3], in tokens of all layers;  requests, positions [num_tokens], at least 7
    """
    addresses = torch.tensor([[3 * SINK, 5 * BLOCK, 2 * BLOCK], [0, 3 * BLOCK, 0]])
    some = [(0, 0), (0, 3), (0, 4), (0, 35), (1, 1), (1, 19), (0, -1)]
    others = {(0, p) for p in range(SINK + 2 * BLOCK)} | {(1, p) for p in range(SINK + BLOCK)}
    tokens = some + sorted(others - set(some))[: num_tokens - len(some)]
    requests, positions = torch.tensor(tokens).unbind(1)
    return addresses, requests, positions


def rope_kv_write(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    norm: bool,
    num_tokens: int = 7,
    basis: bool = False,
) -> float:
    """Error of rotation, of the product with a ``basis`` if asked for, and of KV write.

    Every page but those of the tokens, and every padding, must stay NaN. With ``norm`` a token has other heads before.
    """
    token_nbytes = LAYERS * 2 * kv_heads * head_dim * stored.itemsize
    memory = torch.full((6 * BLOCK * token_nbytes,), NAN_BYTE, dtype=torch.uint8)
    addresses, requests, positions = places(num_tokens)
    rows = token_rows(
        addresses * token_nbytes,
        requests,
        positions,
        sink_tokens=SINK,
        block_tokens=BLOCK,
        row_nbytes=head_dim * stored.itemsize,
    )
    cos, signed_sin = RotaryEmbedding(RopeConfig(attention_factor=1.25), head_dim)(positions + 1000)
    others = 2 if norm else 0
    whole, buffer = fenced(len(rows), others + heads + 2 * kv_heads, head_dim, dtype=dtype)
    whole[:, :others] = float("nan")
    qkv = whole[:, others:]
    weight = (1 + torch.randn(heads + kv_heads, head_dim) / 4).to(dtype) if norm else None
    key_basis, size_of = random_basis(kv_heads, head_dim, dtype) if basis else None, head_norm if basis else pair_norm
    expected_qkv, expected_memory = qkv.clone(), memory.clone()
    worst = 0.0
    for layer in range(LAYERS):
        pages, expected_pages = (m.view(stored).view(-1, head_dim) for m in (memory, expected_memory))
        arguments = (layer, kv_heads, weight, 1e-6)
        before = qkv[:, heads:].clone()
        if key_basis is None:
            q = rope_kv_write_triton(qkv, cos, signed_sin, rows, pages, *arguments)
        else:
            q = rope_basis_kv_write_triton(qkv, cos, signed_sin, rows, pages, *arguments, key_basis)
        expected_q = rope_kv_write_reference(expected_qkv, cos, signed_sin, rows, expected_pages, *arguments, key_basis)
        assert torch.equal(qkv[:, heads:], before) and untouched(buffer)
        worst = max(worst, roundings(q, expected_q, size_of(expected_q)))
        qkv.copy_(expected_qkv)
    assert bool(whole[:, :others].isnan().all())
    num_written = int((positions >= 0).sum()) * LAYERS * 2 * kv_heads
    written = ~expected_pages.isnan().all(1)
    assert int(written.sum()) == num_written and torch.equal(written, ~pages.isnan().any(1))
    nan_bytes = memory.view(stored).view(-1, head_dim)[~written].view(torch.uint8)
    assert bool((nan_bytes == NAN_BYTE).all())
    coarse = dtype if dtype.itemsize < stored.itemsize else stored
    found, expected = (p[written].to(coarse) for p in (pages, expected_pages))
    error = roundings(found, expected, size_of(expected))
    assert coarse is torch.float32 or error <= 3
    return max(worst, error)


def cos_sin(size: int, *, has_scale: bool) -> float:
    """The largest error in roundings of 1, at positions up to a million."""
    positions = torch.cat((torch.arange(5), torch.randint(1 << 20, (12,)), torch.tensor([(1 << 20) - 1])))
    frequencies = RotaryEmbedding(RopeConfig(theta=10_000.0), size)._frequencies.to(positions.device)
    scale = 0.5 + torch.rand(size) if has_scale else None
    found, want = (give(positions, frequencies, scale) for give in (cos_sin_triton, cos_sin_reference))
    return max(roundings(a, b, torch.ones_like(b)) for a, b in zip(found, want, strict=True))


def pair_norm(x: Tensor) -> Tensor:
    """The length of each rotated pair, which a rotation keeps: its components may cancel."""
    first, second = x.double().chunk(2, dim=-1)
    norm = torch.hypot(first, second)
    return torch.cat((norm, norm), -1)


def head_norm(x: Tensor) -> Tensor:
    """The length of each head: a product's components may cancel."""
    return x.double().norm(dim=-1, keepdim=True).expand(x.shape)


def random_basis(kv_heads: int, head_dim: int, dtype: torch.dtype) -> KeyBasis:
    """Orthogonal matrices, rows of which are stretched by up to two."""
    k = torch.linalg.qr(torch.randn(kv_heads, head_dim, head_dim))[0] * (1 + torch.rand(kv_heads, head_dim, 1))
    return KeyBasis(*(x.to(dtype).contiguous() for x in (k, torch.linalg.inv(k).mT)))


def cases() -> dict[str, Callable[[], float]]:
    torch.manual_seed(0)
    found: dict[str, Callable[[], float]] = {"swiglu extremes": swiglu_extremes}
    for size in (2, 96, 128):
        for has_scale in (False, True):
            found[f"cos, sin fp32 {size} {has_scale}"] = lambda s=size, h=has_scale: cos_sin(s, has_scale=h)
    for name, dtype in DTYPES.items():
        for size, num_rows in ((1, 3), (7, 5), (96, 11), (1000, 3), (2050, 2)):
            found[f"rms_norm {name} {num_rows} x {size}"] = lambda s=size, n=num_rows, d=dtype: rms_norm(s, n, d)
            found[f"add_rms_norm {name} {num_rows} x {size}"] = lambda s=size, n=num_rows, d=dtype: add_rms_norm(
                s, n, d
            )
        for inner, num_rows in ((1, 2), (5, 3), (1025, 2)):
            found[f"swiglu {name} {num_rows} x {inner}"] = lambda i=inner, n=num_rows, d=dtype: swiglu(i, n, d)
            found[f"gate {name} {num_rows} x {inner}"] = lambda i=inner, n=num_rows, d=dtype: sigmoid_gate(i, n, d)
        for norm in (False, True):
            for heads, kv_heads, head_dim in ((7, 1, 6), (6, 3, 10), (4, 2, 80)):
                shape = (heads, kv_heads, head_dim)
                found[f"rope {name} {shape} norm {norm}"] = lambda s=shape, d=dtype, m=norm: rope_kv_write(*s, d, d, m)
    for model, stored in (("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")):
        types = DTYPES[model], DTYPES[stored]
        found[f"rope {model}, pages {stored}"] = lambda t=types: rope_kv_write(4, 2, 16, *t, True)
    for name, dtype in DTYPES.items():
        for head_dim, norm, tokens in ((64, False, 7), (80, True, TILE_TOKENS + 20), (96, True, 7), (256, False, 7)):
            shape = (4, 2, head_dim, dtype, dtype, norm, tokens, True)
            found[f"rope basis {name} D{head_dim} {tokens} tokens"] = lambda s=shape: rope_kv_write(*s)
    types = DTYPES["bf16"], DTYPES["fp32"]
    found["rope basis bf16 D128, pages fp32"] = lambda: rope_kv_write(3, 1, 128, *types, True, TILE_TOKENS + 1, True)
    found["rope basis fp32 D6"] = lambda: rope_kv_write(6, 3, 6, types[1], types[1], True, 7, True)
    return found


if __name__ == "__main__":
    report(cases())
