"""The small fused operations on the CPU, against the operators that they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS, KVConfig, RungConfig
from qkv_engine.device.cache import KVCache
from qkv_engine.device.layouts import build_ladder
from qkv_engine.device.mover import Mover
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kernels.rms_norm import add_rms_norm, reference, rms_norm
from qkv_engine.kernels.rope_kv_write import rope_kv_write
from qkv_engine.kernels.swiglu import swiglu
from qkv_engine.kv.block import BlockTable
from qkv_engine.models.rope import RopeConfig, RotaryEmbedding
from qkv_engine.request import Request, SamplingParams
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest
from studies.kernels.token_rows import token_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 96])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, residual = torch.randn(2, 5, size).to(dtype)
    weight = (1 + torch.randn(size) / 4).to(dtype)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=tolerance, atol=1e-6
    )
    total = x + residual
    found = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(found, reference.rms_norm(total, weight, 1e-5), rtol=tolerance, atol=1e-6)


def test_swiglu_rounds_twice() -> None:
    gate, up = torch.randn(2, 3, 33).bfloat16()
    silu = (gate.float() * gate.float().sigmoid()).bfloat16()
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), silu * up, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_rope_kv_write_equals_the_separate_operators(dtype: torch.dtype, norm: bool) -> None:
    qkv = torch.randn(5, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    cos, signed_sin = RotaryEmbedding(RopeConfig(), HEAD_DIM)(torch.tensor([0, 5, 77, 900, 3]))
    rows = torch.tensor([[0, 7], [1, 7], [6, 7], [-1, 0], [200, 3]])
    pages = torch.full((300, HEAD_DIM), float("nan"), dtype=dtype)
    qk, v = qkv.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
    weight = (1 + torch.randn(HEADS + KV_HEADS, HEAD_DIM) / 4).to(dtype) if norm else None
    if weight is not None:
        qk = F.rms_norm(qk, (HEAD_DIM,), None, 1e-6).mul_(weight)
    rotated = (qk * cos).addcmul_(qk.roll(HEAD_DIM // 2, -1), signed_sin).to(dtype)
    q, k = rotated.split((HEADS, KV_HEADS), dim=1)
    v = v.clone()
    found = rope_kv_write(qkv, cos, signed_sin, rows, pages, 1, KV_HEADS, weight, 1e-6)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found, q, **tolerance)
    for token, (row, stride) in enumerate(rows.tolist()):
        if row >= 0:
            k_rows = row + (2 * KV_HEADS + torch.arange(KV_HEADS)) * stride
            torch.testing.assert_close(pages[k_rows], k[token], **tolerance)
            assert torch.equal(pages[k_rows + KV_HEADS * stride], v[token])
    assert int((~pages.isnan()).all(1).sum()) == 4 * 2 * KV_HEADS


@pytest.mark.parametrize("sink", [0, 4, 32])
def test_tokens_are_where_attention_reads_them(sink: int) -> None:
    """Prompts, chunks and single tokens, in sinks, blocks and behind sealed ones."""
    rungs = (RungConfig("dense32", "dense32", "dense32"), uniform_rung(8))
    config = KVConfig(name="x", rungs=rungs, sink=sink)
    ladder = build_ladder(config, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    cache = KVCache(ladder, 16 * ladder.widest.block_nbytes, torch.device("cpu"))
    requests = {name: Request(name, [1] * 1000, SamplingParams(), 1, floor=0) for name in "abc"}
    for name in requests:
        cache.tables.open(name, len(rungs) - 1)
    for growth in ({"a": 300, "b": 2}, {"b": 1, "a": 130}, {"b": 40}, {"a": 1, "b": 1, "c": 40}):
        for name, number in growth.items():
            assert cache.tables.reserve(name, requests[name].num_computed_tokens + number)
        cache.apply_moves(Mover(cache.memory, ladder))
        items = [ScheduledRequest.of(requests[n], requests[n].num_computed_tokens, k) for n, k in growth.items()]
        _write_and_read(cache, ScheduledBatch(items))
        for item in items:
            item.request.num_computed_tokens = item.end
        if requests["a"].num_computed_tokens == 300:
            cache.tables.demote([(block, 1) for block in cache.tables.main["a"].blocks[:2]])


def _write_and_read(cache: KVCache, batch: ScheduledBatch) -> None:
    """Writes a step's tokens unrotated; each is in its slot, and nothing else has changed."""
    elements, num_tokens = cache.memory.view(torch.float32), batch.num_tokens
    elements.fill_(float("nan"))
    cos, sin = torch.ones(num_tokens, 1, HEAD_DIM), torch.zeros(num_tokens, 1, HEAD_DIM)
    qkv = torch.randn(LAYERS, num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    for layer in range(LAYERS):
        rows = _rows(cache, batch)
        rope_kv_write(qkv[layer], cos, sin, rows, elements.view(-1, HEAD_DIM), layer, KV_HEADS)
    kv = qkv[:, :, HEADS:].unflatten(2, (2, KV_HEADS)).movedim(1, 0)
    tokens = iter(kv)  # [layers, K and V, heads, D] each
    for item in batch.items:
        table = cache.tables.main[item.request.request_id]
        for position in range(item.start, item.end):
            place = _place(cache, table, position)
            assert torch.equal(place, next(tokens))
            place.fill_(float("nan"))
    assert elements.isnan().all()


def _place(cache: KVCache, table: BlockTable, position: int) -> Tensor:
    """Where attention reads the token at ``position``: a view [layers, 2, H, D] of its slot."""
    sink = cache.ladder.sink
    if position < sink:
        block, num_tokens, offset = table.slots[0], sink, position
    else:
        number, offset = divmod(position - sink, BLOCK_TOKENS)
        block, num_tokens = table.blocks[number], BLOCK_TOKENS
    found = cache.memory[block.slot.address : block.slot.address + block.slot.nbytes].view(torch.float32)
    return found.view(LAYERS, 2, KV_HEADS, num_tokens, HEAD_DIM)[:, :, :, offset]


def _rows(cache: KVCache, batch: ScheduledBatch) -> Tensor:
    tables = [[block.slot.address for block in cache.tables.main[item.request.request_id]] for item in batch.items]
    width = max(map(len, tables))
    return token_rows(
        torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        torch.tensor([i for i, item in enumerate(batch.items) for _ in range(item.num_tokens)]),
        torch.tensor([p for item in batch.items for p in range(item.start, item.end)]),
        sink_tokens=cache.ladder.sink,
        block_tokens=BLOCK_TOKENS,
        row_nbytes=4 * HEAD_DIM,
    )
