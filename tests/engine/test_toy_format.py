"""A family that only the tests register, served by the engine: eager, under pressure, with the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from qkv_engine import ConfigError, Engine, EngineStats, KVConfig, RequestOutput, RungConfig, SamplingParams
from qkv_engine.device.layouts import build_ladder
from qkv_engine.kernels.block_attention import block_attention_reference
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kernels.paged_decode import cpu as paged_decode
from qkv_engine.planner.sensitivity import Candidates

from ..small_demo import small_demo
from ..toy_format import SIGN
from ..toy_format.presets import SIGN_RUNG
from ..toy_format.registered import registered
from .kv.test_cache import Bench

DENSE = RungConfig("dense32", "dense32", "dense32")
MIXED = RungConfig("mixed", "sign-8", "int4-token-64")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHAPE = {"num_layers": 2, "num_kv_heads": 2, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    with registered():
        yield


def serve(eager: bool, kv_memory: str = "64MiB") -> tuple[list[RequestOutput], list[RequestOutput], EngineStats]:
    """Four requests whose prompts begin alike, twice."""
    rng = random.Random(3)
    common = [rng.randrange(5, 1000) for _ in range(170)]
    prompts = [common + [rng.randrange(5, 1000) for _ in range(70 * i)] for i in range(1, 5)]
    kv = KVConfig(name="toy", rungs=(DENSE, SIGN_RUNG), sink=32, eager=eager)
    with Engine(small_demo(), kv=kv, kv_memory=kv_memory, device="cpu") as engine:
        first, second = engine.generate(prompts, GREEDY), engine.generate(prompts, GREEDY)
        return first, second, engine.stats()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("eager", "kv_memory"), [(True, "64MiB"), (False, "3584KiB")], ids=["eager", "pressure"])
def test_answers_are_those_of_dequantized_pages(eager: bool, kv_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, stats = serve(eager, kv_memory)
    assert stats.demotions["dense32->sign"] > 5 and stats.prefix_hit_tokens > 0
    assert all(output.error is None and output.kv.lowest_bits in (1, 32) for output in [*first, *second])
    assert any(output.kv.blocks.get("sign", 0) for output in first)
    calls = []

    def plainly(q, memory, where, page, scale, banks, **rule):
        calls.append(len(where))
        return block_attention_reference(
            q, memory, torch.tensor(where) if isinstance(where, range) else where, page, scale, banks, **rule
        )

    monkeypatch.setattr(paged_decode, "block_attention", plainly)
    plain_first, plain_second, _ = serve(eager, kv_memory)
    assert calls and tokens(first) == tokens(plain_first) and tokens(second) == tokens(plain_second)


@pytest.mark.parametrize("narrow", [SIGN_RUNG, MIXED], ids=lambda rung: rung.name)
def test_attention_equals_that_over_rounded_values(narrow: RungConfig) -> None:
    torch.manual_seed(0)
    bench = Bench(KVConfig(name="toy", rungs=(DENSE, narrow), sink=16))
    for name in "ab":
        bench.open(name)
    bench.step({"a": 700, "b": 300})
    for name, index in (("a", 0), ("a", 2), ("a", 3), ("b", 1)):
        bench.demote(name, index, 1)
    bench.step({"a": 1, "b": 1})
    bench.step({"a": 40, "b": 1})
    bench.cache.tables.check_integrity()


def test_its_preset_is_served_and_the_planner_may_choose_its_formats() -> None:
    with Engine(small_demo(), kv=SIGN.presets[0], kv_memory="64MiB", device="cpu") as engine:
        (output,) = engine.generate([list(range(5, 400))], GREEDY)
    assert output.error is None and output.kv.blocks["sign"] > 0
    assert all("sign-8" in sides for sides in Candidates.of(2, 64, torch.float32))


def test_shapes_and_steps_it_cannot_take_are_refused() -> None:
    mixed = RungConfig("mixed", ("dense32", "int4-channel-128"), ("dense32", "sign-8"))
    with pytest.raises(ConfigError, match=r"format='sign-8': V of layer 1 of rung mixed: .*8 divides.*Choose"):
        build_ladder(KVConfig(name="toy", rungs=(DENSE, mixed)), head_dim=12, **SHAPE)
    with pytest.raises(ConfigError, match=r"rung='sign': K of layer 0.*int4.*from dense ones alone.*int2-channel-128"):
        build_ladder(KVConfig(name="toy", rungs=(DENSE, uniform_rung(4), SIGN_RUNG)), head_dim=64, **SHAPE)
    wide = RungConfig("wide", ("dense32", "sign-8"), "dense32")
    narrow = RungConfig("narrow", ("dense32", "int1-channel-128"), "int8-token-128")
    with pytest.raises(ConfigError, match=r"rung='narrow': K of layer 1.*from sign to uniform.*End the ladder there"):
        build_ladder(KVConfig(name="toy", rungs=(DENSE, wide, narrow)), head_dim=64, **SHAPE)
