"""The cache with its tensor: mixed rungs, sinks, moves and recycled slots against an oracle of plain K and V."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS, DENSE16, KVConfig, RungConfig
from qkv_engine.device.cache import KVCache
from qkv_engine.device.cpu.attention import CpuAttentionPlanner
from qkv_engine.device.layouts import RequestSlot, Rung, build_ladder, ladder_of_layers
from qkv_engine.device.mover import Mover
from qkv_engine.errors import CapacityError, ConfigError
from qkv_engine.kernels.attention_reference import softmax_weights
from qkv_engine.kernels.formats import Side, SideBytes
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.layer_kv import LayerKV
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.rope import Rotation
from qkv_engine.request import Request, SamplingParams
from qkv_engine.scheduler import ScheduledRequest

from .copies import Copy

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 3, 64
SCALE = HEAD_DIM**-0.5
DENSE32 = RungConfig("dense32", "dense32", "dense32")
MIXED_LAYERS = RungConfig("mixed", ("int8-channel-64", "int4-token-32"), ("dense32", "int8-token-128"))
PAIRS = [
    RungConfig(
        f"pairs{bits}",
        (f"int{bits}-channel-128",) * 2,
        (f"int{bits}-token-128", f"int{bits}-token-128-subordinate"),
    )
    for bits in (4, 1)
]
LADDERS = {
    "one rung": KVConfig(name="one", rungs=(DENSE32,)),
    "8-4-2-1": KVConfig(name="steps", rungs=(DENSE32, *(uniform_rung(b) for b in (8, 4, 2, 1))), sink=16),
    "3 bits, no sink": KVConfig(name="three", rungs=(DENSE32, uniform_rung(3, 32))),
    "codes shared": KVConfig(name="shared", rungs=(DENSE32, uniform_rung(8), *PAIRS)),
    "layers differ": KVConfig(name="layers", rungs=(DENSE32, MIXED_LAYERS), sink=32),
}


SPEC = AttentionSpec(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, SCALE)
PLAIN = [SPEC] * LAYERS
SPECS = {
    "plain": PLAIN,
    "windows": [SPEC._replace(window=20), SPEC._replace(window=300)],
    "a window of a block": [SPEC._replace(scale=0.3), SPEC._replace(window=128)],
    "soft cap": [SPEC._replace(softcap=1.5), SPEC._replace(softcap=2.0, window=150)],
    "null logits": [SPEC._replace(has_null_logit=True), SPEC._replace(has_null_logit=True, window=10)],
}


class Oracle:
    """What the cache should hold: K and V of each request as written, and as each block's rung leaves them."""

    def __init__(self, sink: int):
        self.sink = sink
        self.kv: dict[str, Tensor] = {}  # [layers, 2, n, H, D]

    def append(self, request_id: str, kv: Tensor) -> None:
        old = self.kv.get(request_id)
        self.kv[request_id] = kv if old is None else torch.cat((old, kv), dim=2)

    def read(self, request_id: str, layer: int, place: int, rungs: list[Rung]) -> tuple[Tensor, Tensor]:
        """K and V [n, H, D] of a request whose blocks stand on ``rungs``, where the layer has its ``place``."""
        sides = self.kv[request_id][layer].clone()
        for index, rung in enumerate(rungs):
            start = self.sink + index * BLOCK_TOKENS
            for side in (0, 1):
                layout = rung.layout.sides[2 * place + side]
                if layout.dense_dtype is None:
                    tokens = slice(start, start + BLOCK_TOKENS)
                    below = self.kv[request_id][layer - 1, side, tokens]
                    block = sides[side, tokens]
                    block.copy_(_round(block, below, layout))
        return sides[0], sides[1]


def _round(x: Tensor, below: Tensor, side: Side) -> Tensor:
    """Values [T, H, D] as their codes give them back, a subordinate side's being those of ``below``."""
    own, lower = (x.transpose(0, 1)[None] for x in (x, below))
    rows, read = side.family.quantize(own, side), side.dominant or side
    if read != side:
        rows = SideBytes(side.family.quantize(lower, read).codes, rows.meta)
    return side.family.dequantize(rows, read)[0].transpose(0, 1)


class Bench:
    """A cache, its oracle and requests that grow by any number of tokens a step."""

    def __init__(
        self,
        config: KVConfig,
        num_blocks: int = 24,
        others: tuple[RequestSlot, ...] = (),
        specs: Sequence[AttentionSpec] = PLAIN,
    ):
        layers = [LayerKV(KV_HEADS, HEAD_DIM, spec.window) for spec in specs]
        ladder = ladder_of_layers(replace(config, narrow_windows=True), layers, torch.float32)
        ladder = replace(ladder, groups=tuple(replace(group, slots=group.slots + others) for group in ladder.groups))
        block = sum(group.widest.block_nbytes for group in ladder.groups)
        self.cache = KVCache(ladder, num_blocks * block, torch.device("cpu"))
        self.cache.memory.fill_(0xFF)  # NaN in every element nobody wrote
        self.mover = Mover(self.cache.memory, ladder)
        self.copy = Copy(self.cache.tables, 16, 4000)
        self.specs = specs
        self.planner = CpuAttentionPlanner(self.cache.memory, self.copy, ladder, self.specs)
        self.oracle = Oracle(ladder.sink)
        self.requests: dict[str, Request] = {}
        self.decoding: list[str] = []  # in the last step, if it was of single tokens

    def open(self, name: str) -> None:
        self.requests[name] = Request(name, [1] * 4000, SamplingParams(), 1, floor=0)
        self.cache.tables.open(name, len(self.cache.ladder.rungs) - 1)

    def step(self, growth: dict[str, int]) -> None:
        """Writes and attends; every output must equal attention over what the oracle holds.

        What is out of sight is given back first.
        """
        for name, number in growth.items():
            self.cache.tables.trim(name, self.requests[name].num_computed_tokens)
            assert self.cache.tables.reserve(name, self.requests[name].num_computed_tokens + number)
        items = [
            ScheduledRequest.of(self.requests[name], self.requests[name].num_computed_tokens, number)
            for name, number in sorted(growth.items(), key=lambda item: item[1] > 1)
        ]
        assert not self.cache.apply_moves(self.mover)
        names = [item.request.request_id for item in items]
        goes_on = items[-1].num_tokens == 1 and names == self.decoding
        self.decoding = names if items[-1].num_tokens == 1 else []
        rows = self.copy.follow(self.cache.tables, names)
        if self.copy.has_changed:
            self.planner.forget()
        starts, lengths = [item.start for item in items], [item.num_tokens for item in items]
        step = self.planner.plan(rows, starts, lengths, goes_on=goes_on)
        total = sum(item.num_tokens for item in items)
        q = torch.randn(LAYERS, total, KV_HEADS * GROUP, HEAD_DIM)
        kv = torch.randn(LAYERS, 2, total, KV_HEADS, HEAD_DIM)
        still = Rotation(torch.ones(total, 1, HEAD_DIM), torch.zeros(total, 1, HEAD_DIM))
        qkv = torch.cat((q, kv[:, 0], kv[:, 1]), dim=2)
        nulls = [torch.randn(KV_HEADS * GROUP) if spec.has_null_logit else None for spec in self.specs]
        outs = [step.attend(layer, qkv[layer].clone(), still, None, nulls[layer]) for layer in range(LAYERS)]
        first = 0
        for item in items:
            rows = slice(first, first + item.num_tokens)
            first += item.num_tokens
            self.oracle.append(item.request.request_id, kv[:, :, rows])
            for layer in range(LAYERS):
                self._check(item, layer, q[layer, rows], outs[layer][rows], nulls[layer])
            item.request.num_computed_tokens = item.end

    def demote(self, name: str, index: int, rung: int) -> None:
        """Has a block of each group step down to the ladder's ``rung``, if it was not given back."""
        for group, tables in zip(self.cache.ladder.groups, self.cache.tables.groups, strict=True):
            place = index - tables[name].first
            if place >= 0 and tables[name].blocks[place].rung < group.floors[rung]:
                self.cache.tables.demote([(tables[name].blocks[place], group.floors[rung])])

    def close(self, name: str) -> None:
        self.cache.tables.release(name)
        del self.requests[name]
        self.oracle.kv.pop(name, None)

    def _check(self, item: ScheduledRequest, layer: int, q: Tensor, out: Tensor, nulls: Tensor | None) -> None:
        name, spec = item.request.request_id, self.specs[layer]
        number, place = self.cache.ladder.places[layer]
        group, table = self.cache.ladder.groups[number], self.cache.tables.groups[number][name]
        rungs = [group.widest] * table.first + [group.rungs[block.rung] for block in table.blocks]
        k, v = (x.repeat_interleave(GROUP, dim=1) for x in self.oracle.read(name, layer, place, rungs))
        scores = torch.einsum("nhd,thd->hnt", q, k) * spec.scale
        weights = softmax_weights(scores, window=spec.window, softcap=spec.softcap, null_logits=nulls)
        expected = torch.einsum("hnt,thd->nhd", weights, v)
        assert ((out - expected).norm() / expected.norm()).item() < 2e-5


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("config", LADDERS.values(), ids=LADDERS.keys())
def test_attention_reads_what_each_rung_left(config: KVConfig, specs: Sequence[AttentionSpec]):
    torch.manual_seed(0)
    if config.name == "shared" and specs[0].window != specs[1].window:
        with pytest.raises(ConfigError, match="no such codes one layer below"):
            Bench(config, specs=specs)
        return
    bench = Bench(config, specs=specs)
    last = len(config.rungs) - 1
    bench.open("a")
    bench.open("b")
    bench.step({"a": 700, "b": 5})
    bench.step({"a": 1, "b": 1})
    for index in (0, 2, 3):
        for rung in range(1, last + 1) if index else (last,):
            if last:
                bench.demote("a", index, rung)
    bench.step({"a": 1, "b": 1})
    bench.step({"a": 40, "b": 200})
    bench.open("c")
    bench.step({"a": 1, "b": 1, "c": 253})
    for _ in range(6):  # on into another block
        bench.step({"a": 1, "b": 1, "c": 1})
    bench.cache.tables.check_integrity()


@pytest.mark.parametrize("seed", [0, 2, 8, 10, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 9, 11))])
def test_random_histories(seed: int):
    """Growth, steps down, endings and crowding in random order, on slots that others used before."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = rng.choice(list(LADDERS.values()))
    specs = PLAIN if seed < 8 or config.name == "shared" else rng.choice(list(SPECS.values()))
    bench, names = Bench(config, specs=specs), iter(f"r{i}" for i in range(1000))
    tables, last = bench.cache.tables, len(config.rungs) - 1
    for _ in range(25):
        if len(bench.requests) < 4 and rng.random() < 0.5:
            bench.open(next(names))
        if bench.requests and rng.random() < 0.15:
            bench.close(rng.choice(list(bench.requests)))
        for name, request in bench.requests.items():
            for index, block in enumerate(tables.main[name].blocks, tables.main[name].first):
                is_full = bench.oracle.sink + (index + 1) * BLOCK_TOKENS <= request.num_computed_tokens
                if is_full and block.rung < last and rng.random() < 0.3:
                    bench.demote(name, index, rng.randint(block.rung + 1, last) if block.rung else last)
        growth = {}
        for name, request in bench.requests.items():
            wanted = rng.choice((1, 1, 1, 2, 60, 128, 300))
            room = tables.room_for(name, request.num_computed_tokens + wanted) - request.num_computed_tokens
            if room > 0 and tables.reserve(name, request.num_computed_tokens + room):
                growth[name] = room
        if growth:
            bench.step(growth)
        tables.check_integrity()


def test_a_block_that_is_not_finite_is_reported_and_stored_finite():
    bench = Bench(LADDERS["8-4-2-1"])
    bench.open("a")
    bench.step({"a": 300})
    first, second = bench.cache.tables.main["a"].blocks[:2]
    nbytes = first.slot.nbytes
    bench.cache.memory[first.slot.address : first.slot.address + nbytes].view(torch.float32)[77] = float("inf")
    bench.cache.tables.demote([(first, 1), (second, 1)])
    assert bench.cache.apply_moves(bench.mover) == {first}


def test_bytes_in_use_are_the_bytes_of_live_slots():
    bench = Bench(LADDERS["8-4-2-1"])
    bench.open("a")
    bench.step({"a": 600})
    bench.demote("a", 0, 1)
    bench.demote("a", 1, 3)
    found, arena = bench.cache.bytes_in_use(), bench.cache.arena
    assert found["codes"] + found["meta"] + found["dense"] == arena.used_nbytes
    elements = LAYERS * 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS
    assert found["codes"] == elements * (8 + 2) // 8
    bench.close("a")
    assert bench.cache.bytes_in_use().total() == 0 and arena.used_nbytes == 0


def test_a_slot_without_tokens_lies_beside_what_attention_reads():
    bench = Bench(LADDERS["8-4-2-1"], others=(RequestSlot("bank", num_tokens=0, nbytes=4096, num_elements=0),))
    for name, other in ("ab", "cd"):
        bench.open(name)
        bench.open(other)
        bench.step({name: 300, other: 20})
    bench.demote("a", 0, 1)
    banks = {name: bench.cache.tables.main[name].slots[1] for name in "abcd"}
    for number, bank in enumerate(banks.values(), 1):
        bench.cache.memory[bank.slot.address : bank.slot.address + bank.slot.nbytes] = number
    bench.step({"a": 1, "c": 40, "d": 1})
    bench.close("b")
    found = bench.cache.bytes_in_use()
    meta = bench.cache.ladder.rungs[1].meta_nbytes + 3 * 4096
    assert found["meta"] == meta and found["codes"] + meta + found["dense"] == bench.cache.arena.used_nbytes
    for number, name in ((1, "a"), (3, "c"), (4, "d")):  # what is written there stays
        slot = banks[name].slot
        assert bench.cache.memory[slot.address : slot.address + slot.nbytes].unique().tolist() == [number]


def test_ladders_that_cannot_work_are_refused():
    def build(*rungs: RungConfig, **options) -> None:
        build_ladder(
            KVConfig(name="x", rungs=rungs, **options), num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float32
        )

    for rungs, message in (
        ((uniform_rung(8),), "first rung must be dense"),
        ((DENSE16, uniform_rung(4), uniform_rung(8)), "not smaller"),
        ((DENSE16, uniform_rung(8), uniform_rung(3)), "K of layer 0.*from 8 to 3 bits.*Choose from int4-channel-128"),
        ((DENSE16, uniform_rung(8, 128), uniform_rung(4, 32)), "K of layer 0.*keeps side, axis and group"),
        (
            (DENSE16, uniform_rung(8), RungConfig("swapped", "int4-token-128", "int4-channel-128")),
            "rung='swapped': K of layer 0.*axis.*Choose from int4-channel-128",
        ),
        (
            (DENSE16, uniform_rung(3), RungConfig("x", ("int3-channel-128", "int2-channel-128"), "int3-token-128")),
            "K of layer 1.*3 to 2 bits.*End the ladder there",
        ),
        ((DENSE16, RungConfig("x", ("int8-channel-128",), "int8-token-128")), "1 formats for 2 layers"),
        (
            (DENSE16, RungConfig("x", "int2-channel-64-subordinate", "dense16")),
            "K of layer 0 of rung x.*one layer below",
        ),
        (
            (DENSE16, RungConfig("x", "int2-channel-64", ("int4-token-64", "int2-token-64-subordinate"))),
            "64-subordinate.*V of layer 1 of rung x.*layer below.*same format with codes of its own",
        ),
        ((DENSE16, PAIRS[0], uniform_rung(1)), "V of layer 1 grows"),
        ((RungConfig("x", "int5", "int5"),), "unknown KV format"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(*rungs)
    with pytest.raises(ConfigError, match="power of two"):
        build(DENSE16, sink=5)
    with pytest.raises(CapacityError, match="Give at least"):
        Bench(LADDERS["8-4-2-1"], num_blocks=1)
