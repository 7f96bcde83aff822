"""Plans for models whose layers differ: windows by what they hold of a context, states in budgets of bytes."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch

from qkv_engine import CapacityError, ConfigError
from qkv_engine.bench.plan_report import rung_rows
from qkv_engine.device.layouts import Ladder
from qkv_engine.device.per_token import per_token
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.delta_net import StateSpec
from qkv_engine.kv.slabs import make_tables
from qkv_engine.layer_kv import LayerKV, LayerState
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.planner.budget import ladder_of
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.plan import KVPlan
from qkv_engine.planner.pm_kvq import PMKVQ
from qkv_engine.planner.predict import as_good
from qkv_engine.planner.profile import LayerScores

from .profiles import made_up_profile

MIB = 2**20
LAYERS = tuple(LayerKV(2, 64, window) for window in (300, 300, None, 300, 300, None))
WINDOWS = ModelFingerprint("made up", "Gemma3ForCausalLM", 6, 2, 64, 256, 1000, None, layers=LAYERS)
STATES = (LayerState(num_k_heads=2, num_v_heads=4, k_dim=32, v_dim=64, conv_width=4),) * 4
PLAIN = ModelFingerprint("made up", "Qwen3_5ForCausalLM", 2, 2, 64, 256, 1000, None)
HYBRID = msgspec.structs.replace(PLAIN, states=STATES)


def held(ladder: Ladder, context: int) -> list[int]:
    """Bytes of a request on each rung, by the books of a cache."""
    tables = make_tables(ladder.spec, 2**28)
    return [sum(s * n for s, n in tables.demand(context, rung).items()) for rung in range(len(ladder.names))]


def test_rungs_step_down_evenly_in_what_a_request_holds() -> None:
    """Layers with a window step down at once where that frees as much as the others' next step, not block by block."""
    context = 40_000
    kv = Mixed(budget="2.5bits", context=context).solve(made_up_profile(WINDOWS), WINDOWS)
    nbytes = held(ladder_of(kv, WINDOWS), context)
    shares = [after / before for before, after in pairwise(nbytes)]
    assert len(nbytes) == 8 and max(shares) < 0.9 and min(shares) > 0.6


def test_bits_of_a_rung_are_those_of_a_request() -> None:
    context = 40_000
    plan = KVPlan.make(Mixed(budget="2.5bits", context=context), made_up_profile(WINDOWS), WINDOWS)
    ladder = ladder_of(plan.config("plan"), WINDOWS)
    elements = 2 * 2 * 64 * (2 * context + 4 * 300)
    for row, nbytes in zip(rung_rows(plan), held(ladder, context), strict=True):
        assert row.bits == pytest.approx(8 * nbytes / elements, abs=0.35)  # beside sink, recent tokens and open blocks


def test_a_token_takes_what_its_layers_hold() -> None:
    ladder = ladder_of(KVmix().solve(made_up_profile(WINDOWS), WINDOWS), WINDOWS)
    full, window = (2 * group.narrowest.block_nbytes / 256 for group in reversed(ladder.groups))
    assert per_token(ladder, ladder.last, 300).nbytes == full + window
    found = per_token(ladder, ladder.last, 3000)
    assert found.nbytes == pytest.approx(full + window / 10)
    assert found.code_bits == pytest.approx((2 * 2 * 10 + 16 * 4) / 24, abs=1.0) and found.code_bits < found.bits


def test_a_small_budget_has_fewer_rungs() -> None:
    """Each rung may cost a slab: at 6 MiB two are left, and no plan has less."""
    profile = made_up_profile(WINDOWS)
    settings = Mixed(budget="6MiB", context=2000, requests=4)
    kv = settings.solve(profile, WINDOWS)
    assert 2 <= len(kv.rungs) < settings.rungs and settings.parsed().holds(ladder_of(kv, WINDOWS))
    assert len(Mixed(budget="8MiB", context=2000, requests=4).solve(profile, WINDOWS).rungs) == settings.rungs
    with pytest.raises(CapacityError, match=r"Give at least 6(\.\d)?MiB"):
        Mixed(budget="5MiB", context=2000, requests=4).solve(profile, WINDOWS)


@pytest.mark.parametrize(("method", "large", "small"), [(Mixed, 3, 2), (PMKVQ, 4, 3)])
def test_a_budget_in_bytes_holds_states_too(method: type[Mixed] | type[PMKVQ], large: int, small: int) -> None:
    profile = made_up_profile(HYBRID)
    mine = method(budget=f"{large}MiB", context=2000, requests=4)
    ladder = ladder_of(mine.solve(profile, HYBRID), HYBRID)
    states = 4 * StateSpec(*STATES[0]).nbytes(torch.bfloat16)
    assert sum(slot.nbytes for slot in ladder.main.slots if slot.is_state) == states
    assert make_tables(ladder.spec, large * MIB).max_requests(2000, ladder.last) >= 4
    less = method(budget=f"{small}MiB", context=2000, requests=4)
    less.solve(profile, PLAIN)
    with pytest.raises(CapacityError, match="no plan is as small"):
        less.solve(profile, HYBRID)


def test_a_budget_in_bits_is_one_of_kv() -> None:
    mine, profile = Mixed(budget="4bits", context=2000), made_up_profile(HYBRID)
    assert mine.solve(profile, HYBRID) == mine.solve(profile, PLAIN)


def test_states_are_part_of_a_fingerprint() -> None:
    config = config_from_hf(SHAPES["qwen3.5-4b"])
    model = ModelFingerprint.of("it", config, None)
    assert len(model.states) == 24 and msgspec.json.decode(msgspec.json.encode(model), type=ModelFingerprint) == model
    model.check_shape(config, "plan.json")
    other = msgspec.structs.replace(model, states=model.states[1:])
    with pytest.raises(ConfigError, match="states of layers without KV"):
        other.check_shape(config, "plan.json")
    with pytest.raises(ValueError, match="states"):
        msgspec.structs.replace(model, states=(LayerState(0, 1, 1, 1, 1),))


def test_presets_are_compared_by_what_a_request_holds() -> None:
    """All of a preset's blocks are smaller together; at 40,000 tokens its layers that see all take more."""
    plan = KVPlan.make(Mixed(budget="2.2bits", context=40_000), made_up_profile(WINDOWS), WINDOWS)
    assert "int4" not in dict(as_good(plan))


def test_kvmix_chooses_among_the_layers_that_take_its_bits() -> None:
    scores = LayerScores([9, 8, 1, 7, 6, 2], [9, 8, 2, 7, 6, 1])
    profile = msgspec.structs.replace(made_up_profile(WINDOWS), scores=scores)
    kv = KVmix(share=0.5).solve(profile, WINDOWS)
    k, v = kv.rungs[1].k, kv.rungs[1].v
    assert (k[2], k[5], v[2], v[5]) == ("int2-channel-32", "int3-channel-32", "int4-token-32", "int2-token-32")
    alone = msgspec.structs.replace(WINDOWS, layers=(LayerKV(2, 64, 300),) * 6)
    with pytest.raises(ConfigError, match=r"low_bits=2: all layers have windows.*Serve the model without a plan"):
        KVmix().solve(made_up_profile(alone), alone)
