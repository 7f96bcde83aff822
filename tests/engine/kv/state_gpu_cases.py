"""Run by test_attention_gpu.py under Triton's interpreter: the GPU's states of a step against the CPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.config import KVConfig, RungConfig
from qkv_engine.device.cache import KVCache
from qkv_engine.device.command import Tokens
from qkv_engine.device.cpu.states import CpuStatePlanner
from qkv_engine.device.gpu.attention import GpuAttentionPlanner
from qkv_engine.device.layouts import ladder_of_layers
from qkv_engine.device.mover import Mover
from qkv_engine.kernels.delta_net import DeltaWeights, StateSpec
from qkv_engine.kernels.delta_net.formats import decode
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.layer_kv import LayerKV
from qkv_engine.models.attention_spec import AttentionSpec

from ...kernels.delta_net_cases import make_rows, make_weights
from ...kernels.interpreted import report
from .copies import Copy

DENSE32 = RungConfig("dense32", "dense32", "dense32")
SPECS = (
    StateSpec(num_k_heads=2, num_v_heads=4, k_dim=20, v_dim=12, conv_width=4),
    StateSpec(num_k_heads=1, num_v_heads=2, k_dim=16, v_dim=40, conv_width=3),
)
STEPS: tuple[dict[str, int], ...] = (  # tokens by request: single ones first
    {"a": 70},
    {"a": 1, "b": 5},
    {"c": 1, "a": 66, "b": 2},
    {"a": 1, "b": 1, "c": 1},
)


def compare(
    rungs: tuple[RungConfig, ...], sink: int, padding: int, window: int | None = None, state_dtype: str = "float32"
) -> float:
    """Largest relative difference of outputs and states over some steps. ``padding``: rows behind single tokens."""
    torch.manual_seed(0)
    layers = [LayerKV(2, 64, window), LayerKV(2, 64)]
    config = KVConfig(name="x", rungs=(DENSE32, *rungs), sink=sink, state_dtype=state_dtype)
    ladder = ladder_of_layers(config, layers, torch.float32, SPECS)
    cache = KVCache(ladder, 2**21, torch.device("cpu"))
    cache.memory.fill_(0xFF)
    copy = Copy(cache.tables, 3, 400)
    gpu = GpuAttentionPlanner(cache.memory, copy, ladder, [AttentionSpec(4, 2, 64, 0.1)] * 2)
    weights = [make_weights(spec, torch.float32) for spec in SPECS]
    computed = dict.fromkeys("abc", 0)
    for name in computed:
        cache.tables.open(name, len(rungs), num_prompt_tokens=200)
    worst = 0.0
    for growth in STEPS:
        for name, number in growth.items():
            assert cache.tables.reserve(name, computed[name] + number)
        cache.apply_moves(Mover(cache.memory, ladder))
        columns = copy.follow(cache.tables, growth), [computed[name] for name in growth], list(growth.values())
        worst = max(worst, step(cache, gpu, columns, weights, padding))
        for name, number in growth.items():
            computed[name] += number
    return max(worst, go_on_from_checkpoint(cache, gpu, copy, weights, computed["a"]))


def go_on_from_checkpoint(
    cache: KVCache, gpu: GpuAttentionPlanner, copy: Copy, weights: list[DeltaWeights], start: int
) -> float:
    """The same for a request "b" that begins anew on copies of the states of "a", behind its ``start`` tokens."""
    tables, main, worst = cache.tables, cache.tables.main, 0.0
    kept = [tables.store.new_idle_block(main, slot.rung) for slot in main.states("a")]
    tables.store.copy(main.states("a"), kept)
    cache.apply_moves(Mover(cache.memory, cache.ladder))
    tables.release("b")
    tables.open("b", len(cache.ladder.names) - 1, num_prompt_tokens=200)
    assert tables.reserve("b", start + 10)
    tables.store.copy(kept, main.states("b"))
    cache.apply_moves(Mover(cache.memory, cache.ladder))
    theirs, ours = ([cache.memory[s.slot.address :][: s.slot.nbytes] for s in main.states(name)] for name in "ab")
    assert all(torch.equal(*pair) for pair in zip(theirs, ours, strict=True))
    for begins, number in ((start, 9), (start + 9, 1)):
        columns = copy.follow(tables, {"b": number}), [begins], [number]
        worst = max(worst, step(cache, gpu, columns, weights, 0))
    return worst


def step(
    cache: KVCache,
    planner: GpuAttentionPlanner,
    columns: tuple[list[int], list[int], list[int]],
    weights: list[DeltaWeights],
    padding: int,
) -> float:
    counts = columns[2]
    theirs, tables = cache.memory.clone(), planner.tables
    main = tables.groups[cache.ladder.groups.index(cache.ladder.main)]
    cpu = CpuStatePlanner(theirs, main, cache.ladder)
    expected_step, found_step = cpu.plan(*columns), begin(planner, columns, padding)
    num_single, worst = counts.count(1), 0.0
    behind = slice(num_single, num_single + (padding if num_single else 0))
    for layer, spec in enumerate(SPECS):
        inputs = make_rows(spec, torch.float32, sum(counts))
        padded = [with_padding(x, behind, 0.5 if i == 1 else torch.nan) for i, x in enumerate(inputs)]
        expected = expected_step.delta_net(layer, *inputs, weights[layer])
        found = found_step.delta_net(layer, *padded, weights[layer])  # type: ignore[attr-defined]
        assert not found[behind].any()
        worst = max(worst, error(torch.cat((found[: behind.start], found[behind.stop :])), expected))
    ours = CpuStatePlanner(cache.memory, main, cache.ladder)
    for item in (item._replace(is_first=False) for item in expected_step._items):
        for layer in range(len(SPECS)):
            (_, mine), (_, wanted) = ours.state(layer, item), cpu.state(layer, item)
            worst = max(worst, error(decode(mine.recurrent), decode(wanted.recurrent)), error(mine.conv, wanted.conv))
    return worst


def begin(planner: GpuAttentionPlanner, columns: tuple[list[int], list[int], list[int]], padding: int) -> object:
    """The step as the GPU's runner begins it, from the tables' copy."""
    rows, starts, counts = columns
    number, tables = counts.count(1), planner.tables
    assert planner.states is not None
    first, second = (
        Tokens.of(rows[part], starts[part], counts[part], [0] * sum(counts[part]))
        for part in (slice(number), slice(number, None))
    )
    num_single = number + (padding if number else 0)
    first = first.padded(num_single, tables.spare_row)
    item_blocks, bounds = planner.split(number, num_single) if number else (1, None)
    words = tables.step_input(first.packed(second), item_blocks=item_blocks)
    chunks, states = None, None
    if second.ids:
        later = rows[number:], starts[number:], counts[number:]
        chunks, states = planner.plan_chunks(*later), planner.states.plan_chunks(*later)
    step_input = torch.frombuffer(words, dtype=torch.int64)
    return planner.begin(step_input, len(first.ids) + len(second.ids), num_single, bounds, chunks, states)[1]


def with_padding(x: Tensor, rows: slice, value: float) -> Tensor:
    """``x`` with rows of ``value`` at ``rows``."""
    blank = torch.full((rows.stop - rows.start, *x.shape[1:]), value)
    return torch.cat((x[: rows.start], blank, x[rows.start :]))


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    report(
        {
            "beside a sink, padded": lambda: compare((uniform_rung(4),), 16, 3),
            "in 16 bits": lambda: compare((uniform_rung(4),), 16, 3, state_dtype="int16"),
            "in 8 bits": lambda: compare((uniform_rung(4),), 0, 2, state_dtype="int8"),
        },
        slow={
            "beside patterns": lambda: compare((pattern_rung(2, 20),), 0, 0),
            "behind a group with a window": lambda: compare((uniform_rung(8),), 16, 2, window=50),
        },
    )
