"""Ladders of PM-KVQ and of the planner: budgets kept with everything counted, floors exact, rungs nested."""

from __future__ import annotations

from itertools import pairwise, product

import msgspec
import pytest

from qkv_engine import CapacityError, ConfigError
from qkv_engine.bench.plan_report import layer_rows
from qkv_engine.config import KVConfig
from qkv_engine.device.layouts import Ladder
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.formats import check_step
from qkv_engine.kv.slabs import make_tables
from qkv_engine.layer_kv import LayerKV
from qkv_engine.planner import budget as planner_budget
from qkv_engine.planner.budget import Budget, ladder_of
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.plan import KVPlan
from qkv_engine.planner.pm_kvq import PMKVQ, progressive
from qkv_engine.planner.predict import as_good, outlier_layers, predicted_loss
from qkv_engine.planner.profile import Sensitivities
from qkv_engine.presets import PRESETS

from .profiles import made_up_profile

MODEL = ModelFingerprint("made up", "LlamaForCausalLM", 3, 2, 128, 256, 1000, None)
PROFILE = made_up_profile(MODEL)
BUDGETS = ["2.5bits", "3bits", "4.1 Bits", "7.7bits", "12bits"]


def spent(kv: KVConfig, context: int) -> float:
    """Bits an element of a request at the floor, by the books of a cache that holds it."""
    ladder = ladder_of(kv, MODEL)
    tables = make_tables(ladder.spec, 2**28)
    nbytes = sum(size * number for size, number in tables.demand(context, len(ladder.rungs) - 1).items())
    return 8 * nbytes * 128 / (ladder.widest.num_elements * context)


def floor_cost(kv: KVConfig) -> float:
    loss = predicted_loss(kv.rungs[-1], PROFILE)
    assert loss is not None
    return loss


@pytest.mark.parametrize("text", BUDGETS)
def test_budgets_in_bits_are_kept_with_windows_and_sink(text: str):
    bits = float(text.lower().split("b")[0])
    for settings in (Mixed(budget=text, context=40_000), PMKVQ(budget=text, context=40_000)):
        assert spent(settings.solve(PROFILE, MODEL), 40_000) <= bits
    mixed = Mixed(budget=text, context=40_000).solve(PROFILE, MODEL)
    assert spent(mixed, 40_000) >= 0.9 * bits, "nothing is left that a layer could use"
    short = Mixed(budget="7.7bits", context=2_000).solve(PROFILE, MODEL)
    assert spent(short, 2_000) <= 7.7 < spent(short, 1_000)


def test_the_smallest_budget_that_is_named_is_feasible_and_the_smallest():
    for settings in (Mixed, PMKVQ):
        with pytest.raises(CapacityError) as refusal:
            settings(budget="1bits", context=9_000).solve(PROFILE, MODEL)
        named = str(refusal.value).rsplit(maxsplit=1)[1]
        assert spent(settings(budget=named, context=9_000).solve(PROFILE, MODEL), 9_000) <= float(named[:-4])
        with pytest.raises(CapacityError):
            settings(budget=f"{float(named[:-4]) - 0.02:.2f}bits", context=9_000).solve(PROFILE, MODEL)


@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("size", ["3MiB", "16MiB"])
def test_budgets_in_bytes_hold_so_many_requests_at_once(size: str, requests: int):
    for settings in (Mixed, PMKVQ):
        mine = settings(budget=size, context=4_000, requests=requests)
        try:
            kv = mine.solve(PROFILE, MODEL)
        except CapacityError as refusal:
            assert size == "3MiB"
            mine = settings(budget=str(refusal).rsplit(maxsplit=1)[1], context=4_000, requests=requests)
            kv = mine.solve(PROFILE, MODEL)
        nbytes = mine.parsed().nbytes
        assert nbytes is not None
        tables = make_tables(ladder_of(kv, MODEL).spec, nbytes)
        assert tables.max_requests(4_000, len(kv.rungs) - 1) >= requests


@pytest.mark.parametrize("text", BUDGETS)
def test_the_planners_floor_costs_no_more_than_pm_kvqs_or_any_uniform_one(text: str):
    mixed, pm_kvq = (kind(budget=text, context=40_000).solve(PROFILE, MODEL) for kind in (Mixed, PMKVQ))
    assert floor_cost(mixed) <= floor_cost(pm_kvq)
    nbytes = ladder_of(mixed, MODEL).narrowest.block_nbytes
    for name in ("int8", "int4", "kivi-2", "kitty", "kitty-pro"):
        if ladder_of(PRESETS[name], MODEL).narrowest.block_nbytes <= nbytes:
            assert floor_cost(mixed) <= floor_cost(PRESETS[name]) * 1.0001


@pytest.mark.parametrize("text", BUDGETS)
@pytest.mark.parametrize("number", [2, 5, 12])
def test_rungs_are_nested_and_fall_evenly(text: str, number: int):
    kv = Mixed(budget=text, context=40_000, rungs=number).solve(PROFILE, MODEL)
    ladder = ladder_of(kv, MODEL)  # which checks each step
    assert 2 <= len(ladder.rungs) <= number and not kv.eager and (kv.sink, kv.recent) == (32, 128)
    for wide, narrow in pairwise(ladder.rungs):
        for old, new in zip(wide.layout.sides, narrow.layout.sides, strict=True):
            check_step(old, new)
            assert new.nbytes <= old.nbytes
    floor = Mixed(budget=text, context=40_000, rungs=2).solve(PROFILE, MODEL).rungs[-1]
    assert (kv.rungs[-1].k, kv.rungs[-1].v) == (floor.k, floor.v), "more rungs change no floor"


def test_only_an_eager_plan_has_codes_that_no_demotion_leads_to():
    def formats(kv: KVConfig) -> set[str]:
        return {name for side in (kv.rungs[-1].k, kv.rungs[-1].v) for name in side}

    eager = [Mixed(budget=f"{bits / 4}bits", context=40_000, eager=True) for bits in range(10, 20)]
    assert any("int3" in name for mixed in eager for name in formats(mixed.solve(PROFILE, MODEL)))
    for bits in range(10, 20):
        kv = Mixed(budget=f"{bits / 4}bits", context=40_000).solve(PROFILE, MODEL)
        assert not any("int3" in name for name in formats(kv))
    assert len(eager[0].solve(PROFILE, MODEL).rungs) == 2 and eager[0].solve(PROFILE, MODEL).eager


def test_pm_kvq_allocates_as_brute_force_does():
    budget = Budget.parse("3bits", 40_000)
    kv = PMKVQ(budget="3bits", context=40_000).solve(PROFILE, MODEL)
    costs = []
    for floors in product((16, 8, 4, 2), repeat=3):
        made = progressive("all", floors)
        if budget.holds(ladder_of(made, MODEL)):
            costs.append(floor_cost(made))
    assert floor_cost(kv) == pytest.approx(min(costs))


def test_pm_kvqs_rungs_halve_all_layers_down_to_their_floors():
    kv = progressive("mine", [4, 16, 2, 8])
    assert [rung.name for rung in kv.rungs] == ["dense16", "pm-kvq-8", "pm-kvq-4", "pm-kvq-2"]
    widths = [[name.split("-")[0] for name in rung.k] for rung in kv.rungs[1:]]
    assert widths == [
        ["int8", "dense16", "int8", "int8"],
        ["int4", "dense16", "int4", "int8"],
        ["int4", "dense16", "int2", "int8"],
    ]
    assert all(rung.k == rung.v for rung in kv.rungs) and (kv.sink, kv.recent, kv.eager) == (1, 128, False)
    assert [rung.name for rung in progressive("wide", [8, 8]).rungs] == ["dense16", "pm-kvq-8"]
    assert [rung.name for rung in progressive("dense", [16]).rungs] == ["dense16"]


@pytest.mark.parametrize("floor", [4, 2])
def test_pm_kvqs_presets_have_one_floor_for_all_layers(floor: int):
    ladder, same = (ladder_of(kv, MODEL) for kv in (PRESETS[f"pm-kvq-{floor}"], progressive("x", [floor] * 3)))
    assert [rung.layout for rung in ladder.rungs] == [rung.layout for rung in same.rungs]
    assert [rung.name for rung in ladder.rungs] == [rung.name for rung in same.rungs]
    assert (ladder.sink, ladder.window, ladder.eager) == (same.sink, same.window, same.eager)


@pytest.mark.parametrize("settings", [Mixed, PMKVQ])
def test_one_bit_is_for_floors_that_allow_it(settings: type[Mixed] | type[PMKVQ]):
    with pytest.raises(CapacityError, match=r"Give at least 2\.[2-5]"):
        settings(budget="1.8bits", context=40_000, least_bits=2).solve(PROFILE, MODEL)
    kv = settings(budget="1.8bits", context=40_000, least_bits=1).solve(PROFILE, MODEL)
    assert any("int1" in name for name in kv.rungs[-1].v)


def test_one_bit_is_usual_where_it_is_calibrated():
    assert Mixed(budget="3bits", context=40_000).least_bits == 1
    assert PMKVQ(budget="3bits", context=40_000).least_bits == 2


def test_where_all_fits_at_16_bits_there_is_no_other_rung():
    for settings in (Mixed(budget="17bits", context=8192), PMKVQ(budget="17bits", context=8192)):
        assert [rung.name for rung in settings.solve(PROFILE, MODEL).rungs] == ["dense16"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("budget", text) for text in ("", "3", "0bits", "65bits", "-2bits", "nanbits", "50%", "0.5", "6GiX", "0B")],
        *[("context", number) for number in (0, -1, 10**9)],
        *[("requests", number) for number in (0, 10**9)],
        *[("rungs", number) for number in (1, 13)],
        *[("least_bits", number) for number in (0, 9)],
    ],
)
def test_settings_out_of_range_name_field_and_remedy(field: str, value: object):
    with pytest.raises(ConfigError, match=rf"{field}=.*\. Give"):
        Mixed(**{"budget": "3bits", "context": 8192, field: value})


def test_a_context_that_never_leaves_the_window_is_refused():
    with pytest.raises(ConfigError, match=r"context=200: no block leaves the window\. Give more than 288 tokens"):
        Mixed(budget="3bits", context=200).solve(PROFILE, MODEL)
    with pytest.raises(ConfigError, match="Give more than 288 tokens"):
        Mixed(budget="17bits", context=288).solve(PROFILE, MODEL)
    assert Mixed(budget="17bits", context=289).solve(PROFILE, MODEL).rungs


@pytest.mark.parametrize("method", [Mixed, PMKVQ])
def test_a_profile_without_formats_is_refused(method: type[Mixed] | type[PMKVQ]):
    bare = msgspec.structs.replace(PROFILE, sensitivities=Sensitivities({}, {}))
    with pytest.raises(ConfigError, match=r"no format in it fits.*Profile the model again"):
        method(budget="3bits", context=8192).solve(bare, MODEL)


def test_presets_that_do_as_well_are_named():
    plan = KVPlan.make(PMKVQ(budget="4.7bits", context=40_000), PROFILE, MODEL)
    assert dict(as_good(plan))["int4"] == pytest.approx(floor_cost(PRESETS["int4"]))
    assert not dict(as_good(KVPlan.make(Mixed(budget="3.1bits", context=40_000), PROFILE, MODEL)))


def test_keys_with_outliers_are_found_where_no_norm_tames_them():
    wild = msgspec.structs.replace(PROFILE, key_outliers=[3.0, 9.0, 40.0])
    assert outlier_layers(wild) == [1, 2] and outlier_layers(PROFILE) == []
    assert outlier_layers(msgspec.structs.replace(wild, has_qk_norm=True)) == []


# Four layers that see all, and four with a window of 1,000 tokens and larger heads.
WINDOWS = msgspec.structs.replace(
    MODEL, num_layers=8, layers=(LayerKV(2, 128), LayerKV(4, 256, 1000)) * 4, architecture="Gemma4ForCausalLM"
)


@pytest.mark.parametrize("settings", [Mixed, PMKVQ])
def test_windows_keep_eight_bits_and_are_counted_by_the_blocks_that_they_hold(settings: type[Mixed] | type[PMKVQ]):
    context = 40_000
    mine = settings(budget="4.5bits", context=context)
    kv = mine.solve(made_up_profile(WINDOWS), WINDOWS)
    ladder = ladder_of(kv, WINDOWS)
    stored = ladder.stored(ladder.last)
    assert min(ladder.groups[0].narrowest.bits, 4) < 8 <= ladder.groups[1].narrowest.bits
    assert stored == kv.rungs[-1], "the file names what blocks really take"
    demand = make_tables(ladder.spec, 2**28).demand(context, ladder.last)
    elements = 4 * 2 * (2 * 128 * context + 4 * 256 * 1000)
    bits = 8 * sum(size * number for size, number in demand.items()) / elements
    assert mine.parsed().bits_at(ladder) == pytest.approx(bits) and 4.0 < bits <= 4.5
    blocks = [group.split(context, 1) for group in ladder.spec.groups]
    assert blocks[0] == (2, 311) and sum(blocks[1]) == 9


def test_a_budget_in_bytes_counts_windows_once_whatever_the_context():
    mine = Mixed(budget="80MiB", context=40_000, requests=2, rungs=2)
    profile = made_up_profile(WINDOWS)
    ladder = ladder_of(mine.solve(profile, WINDOWS), WINDOWS)
    assert make_tables(ladder.spec, 80 * 2**20).max_requests(40_000, ladder.last) >= 2
    as_full = msgspec.structs.replace(WINDOWS, layers=tuple(layer._replace(window=None) for layer in WINDOWS.layers))
    with pytest.raises(CapacityError, match="no plan is as small"):
        mine.solve(profile, as_full)


@pytest.mark.parametrize("nbytes", ["80MiB", "125MiB"])
def test_a_budget_in_bytes_takes_few_ladders(nbytes: str, monkeypatch: pytest.MonkeyPatch):
    tried = list[Ladder]()

    def count(kv: KVConfig, model: ModelFingerprint) -> Ladder:
        tried.append(ladder_of(kv, model))
        return tried[-1]

    monkeypatch.setattr(planner_budget, "ladder_of", count)
    kv = Mixed(budget=nbytes, context=40_000, requests=2, rungs=8).solve(made_up_profile(WINDOWS), WINDOWS)
    budget = Budget.parse(nbytes, 40_000, 2)
    ladder = ladder_of(kv, WINDOWS)
    assert len(tried) <= 3 + planner_budget.TRIES and budget.holds(ladder)
    room = max(each.groups[0].narrowest.block_nbytes for each in tried if budget.holds(each))
    assert ladder.groups[0].narrowest.block_nbytes == room, "the widest floor that was found to fit"


def test_a_window_within_the_recent_tokens_has_nothing_to_plan():
    short = msgspec.structs.replace(WINDOWS, layers=(LayerKV(2, 128, 100),) * 8)
    with pytest.raises(ConfigError, match=r"before the 128 recent tokens\. Serve the model without a plan"):
        Mixed(budget="3bits", context=40_000).solve(made_up_profile(short), short)


@pytest.mark.parametrize("settings", [Mixed, PMKVQ])
def test_a_model_of_windows_alone_has_a_plan_for_its_windows(settings: type[Mixed] | type[PMKVQ]):
    alone = msgspec.structs.replace(WINDOWS, layers=(LayerKV(2, 128, 1000),) * 8)
    with pytest.raises(CapacityError, match="no plan is as small"):
        settings(budget="8bits", context=40_000).solve(made_up_profile(alone), alone)
    mine = settings(budget="13bits", context=40_000)
    ladder = ladder_of(mine.solve(made_up_profile(alone), alone), alone)
    assert ladder.last > 0 and 8 <= ladder.groups[0].narrowest.bits < 16 and mine.parsed().bits_at(ladder) <= 13


def test_fewer_bits_than_windows_take_are_said_not_to_be_stored():
    profile = made_up_profile(WINDOWS)
    ladder = ladder_of(KVmix().solve(profile, WINDOWS), WINDOWS)
    formats = ladder.stored(ladder.last).formats("k", 8)
    assert formats[1::2] == ("dense16",) * 4 and all(name.startswith("int") for name in formats[::2])
    rows = layer_rows(KVPlan.make(KVmix(), profile, WINDOWS))
    assert [row.k_bits for row in rows[1::2]] == [16] * 4 and max(row.k_bits for row in rows[::2]) < 8
