"""Run by test_attention_gpu.py under Triton's interpreter: the GPU's step against the CPU's, on the same cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from qkv_engine.config import KVConfig, RungConfig
from qkv_engine.device.cache import KVCache
from qkv_engine.device.command import Tokens
from qkv_engine.device.cpu.attention import CpuAttentionPlanner
from qkv_engine.device.gpu.attention import GpuAttentionPlanner, GpuGroupPlanner
from qkv_engine.device.gpu.mixed import PlanBuffer, padded_chunk, padded_decodes
from qkv_engine.device.layouts import ladder_of_layers
from qkv_engine.device.mover import Mover
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.layer_kv import LayerKV
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.rope import Rotation
from qkv_engine.request import Request, SamplingParams
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ...kernels.fused_cases import random_basis
from ...kernels.interpreted import report
from .copies import Copy

HEADS = 4
EIGHT_AND_FOUR = RungConfig(
    "int8-4", ("int8-channel-128", "int4-channel-128"), ("int8-token-128", "int4-token-128")
)  # by layer: pages of the second have the same format on the rung of 4 bits, at another offset
EIGHT_IN_SMALL_GROUPS = RungConfig("int8", "int8-channel-64", "int8-token-32")
PAIR = RungConfig(
    "pair",
    ("int2-channel-64-eta0.045", "int2-channel-64-eta0.045-subordinate"),
    ("int1-token-32-eta1/6", "int1-token-32-eta1/6-subordinate"),
)
DENSE32 = RungConfig("dense32", "dense32", "dense32")


def windows(*sizes: int | None) -> tuple[LayerKV, ...]:
    """Layers that differ in their windows alone."""
    return tuple(LayerKV(2, 64, size) for size in sizes)


def compare(
    rungs: tuple[RungConfig, ...], sink: int, layers: tuple[LayerKV, ...], is_padded: bool = False, **rule: Any
) -> float:
    """Largest relative difference over a mixed step: a prompt, a chunk after sealed blocks, single tokens.

    The last layer leaves out all but single tokens and the last ones of chunks, in a step that is not padded.
    ``rule``: what the specs of the ``layers`` have beside their KV.  ``is_padded``: both parts of a step are, as a
    captured one's, and the plan of chunks lies at a fixed place.
    """
    torch.manual_seed(0)
    has_windows = any(layer.window for layer in layers)
    config = KVConfig(name="x", rungs=(DENSE32, *rungs), sink=sink, narrow_windows=has_windows)
    ladder = ladder_of_layers(config, layers, torch.float32)
    cache = KVCache(ladder, 16 * sum(g.widest.block_nbytes for g in ladder.groups), torch.device("cpu"))
    cache.memory.fill_(0xFF)
    requests = {name: Request(name, [1] * 1000, SamplingParams(), 1, floor=0) for name in "abc"}
    copy = Copy(cache.tables, 3, 1000)
    specs = [AttentionSpec(HEADS, h, dim, dim**-0.5, window)._replace(**rule) for h, dim, window in layers]
    triton = GpuAttentionPlanner(cache.memory, copy, ladder, specs, last_layer=len(specs) - 1)
    for name in requests:
        cache.tables.open(name, len(rungs), num_prompt_tokens=200)
    worst = 0.0
    for growth in ({"a": 300, "b": 5}, {"b": 1, "a": 130}, {"a": 1, "b": 1, "c": 40}):
        for name, number in growth.items():
            cache.tables.trim(name, requests[name].num_computed_tokens)
            assert cache.tables.reserve(name, requests[name].num_computed_tokens + number)
        items = [ScheduledRequest.of(requests[n], requests[n].num_computed_tokens, k) for n, k in growth.items()]
        batch = ScheduledBatch(sorted(items, key=lambda item: item.num_tokens > 1))
        cache.apply_moves(Mover(cache.memory, ladder))
        worst = max(worst, step(cache, triton, specs, batch, is_padded))
        for item in items:
            item.request.num_computed_tokens = item.end
        if rungs and requests["a"].num_computed_tokens == 300:
            cache.tables.coldest("a", 300)
            for group, tables in zip(ladder.groups, cache.tables.groups, strict=True):
                first, second = tables["a"].blocks[:2]
                cache.tables.demote([(first, group.floors[1]), (second, group.floors[-1])])
    return worst


def step(
    cache: KVCache, triton: GpuAttentionPlanner, specs: list[AttentionSpec], batch: ScheduledBatch, is_padded: bool
) -> float:
    total = batch.num_tokens
    rows = triton.tables.follow(cache.tables, [item.request.request_id for item in batch.items])
    columns = rows, [item.start for item in batch.items], [item.num_tokens for item in batch.items]
    gpu, places = triton_step(triton, *columns, is_padded)
    is_token = torch.tensor([place >= 0 for place in places])
    source = torch.tensor(places).clamp(min=0)
    cpu = CpuAttentionPlanner(cache.memory, triton.tables, cache.ladder, specs).plan(*columns)
    nulls = torch.randn(HEADS) if specs[0].has_null_logit else None
    wanted = slice(None) if is_padded else ends(item.num_tokens for item in batch.items)
    worst = 0.0
    for layer, (num_heads, num_kv_heads, head_dim, *_) in enumerate(specs):
        qkv = torch.randn(total, num_heads + 2 * num_kv_heads, head_dim)
        angles = torch.randn(total, 1, head_dim // 2).repeat(1, 1, 2)
        rotation = Rotation(angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(head_dim // 2))
        basis = random_basis(num_kv_heads, head_dim, torch.float32) if layer % 2 else None
        rows = qkv[source].masked_fill_(~is_token[:, None, None], torch.nan)
        turned = Rotation(rotation.cos[source], rotation.signed_sin[source])
        found = gpu.attend(layer, rows, turned, None, nulls, basis)[is_token]
        expected = cpu.attend(layer, qkv, rotation, None, nulls, basis)
        if layer == len(specs) - 1:
            found, expected = found[wanted], expected[wanted]
        worst = max(worst, ((found - expected).norm() / expected.norm()).item())
    return worst


def ends(counts: Iterable[int]) -> Tensor:
    """Places of the last token of each of the items with so many."""
    return torch.tensor(list(accumulate(counts))) - 1


def triton_step(
    planner: GpuAttentionPlanner, rows: list[int], starts: list[int], counts: list[int], is_padded: bool
) -> tuple[AttentionBatch, list[int]]:
    """The step as the GPU's runner begins it, from the tables' copy; of each row the token's index, -1 for padding."""
    tables, num_decodes = planner.tables, counts.count(1)
    parts = [
        Tokens.of(rows[part], starts[part], counts[part], [0] * sum(counts[part]))
        for part in (slice(num_decodes), slice(num_decodes, None))
    ]
    chunks = (
        planner.plan_chunks(rows[num_decodes:], starts[num_decodes:], counts[num_decodes:]) if parts[1].ids else None
    )
    sizes, last = [len(part.ids) for part in parts], None
    if chunks is not None and not is_padded:
        last = planner.plan_last(chunks, ends(counts) - num_decodes, chunks)
    if is_padded:
        sizes = [padded_decodes(sizes[0]), padded_chunk(sizes[1]) if sizes[1] else 0]
        if chunks is not None and all(work.rungs == (0,) for work in chunks):
            pairs = zip(planner.groups, chunks, strict=True)
            chunks = [at_a_fixed_place(planner, group, work) for group, work in pairs]
    item_blocks, bounds = planner.split(num_decodes, sizes[0]) if num_decodes else (1, None)
    first, second = (part.padded(size, tables.spare_row) for part, size in zip(parts, sizes, strict=True))
    words = tables.step_input(first.packed(second), item_blocks=item_blocks)
    step_input = torch.frombuffer(words, dtype=torch.int64)
    places, total = list[int](), 0
    for part, size in zip(parts, sizes, strict=True):
        places += list(range(total, total + len(part.ids))) + [-1] * (size - len(part.ids))
        total += len(part.ids)
    return planner.begin(step_input, sum(sizes), sizes[0], bounds, chunks, None, last)[1], places


def at_a_fixed_place(planner: GpuAttentionPlanner, group: GpuGroupPlanner, work: PrefillWork) -> PrefillWork:
    buffer = PlanBuffer(planner.tile_tokens, group.spec, torch.device("cpu"))
    buffer.send(work)
    return buffer.work(len(work.tiles) + 3)


if __name__ == "__main__":
    alike = windows(None, None)
    report(
        {
            "one rung, sink, padded": lambda: compare((), 16, alike, is_padded=True),
            "windows, nested rungs": lambda: compare((EIGHT_AND_FOUR, uniform_rung(4)), 32, windows(300, 150)),
            "a window, two head dims, null logits, 4 and 2 bits": lambda: compare(
                (uniform_rung(4), uniform_rung(2)), 16, (LayerKV(1, 80), LayerKV(2, 32, 180)), has_null_logit=True
            ),
            "codes of the layer below": lambda: compare((EIGHT_IN_SMALL_GROUPS, PAIR), 16, alike),
        },
        slow={
            "windows, padded": lambda: compare((), 16, windows(None, 100), is_padded=True),
            "a window, soft cap, null logits": lambda: compare(
                (uniform_rung(4),), 0, windows(200, 200), softcap=3.0, has_null_logit=True, scale=0.3
            ),
            "patterns, sink": lambda: compare((pattern_rung(2, 20),), 16, alike),
            "3 bits, groups of 32, head dim 80": lambda: compare((uniform_rung(3, 32),), 0, (LayerKV(2, 80),) * 2),
        },
    )
