"""Spectral plans: bases that decorrelate, gains that quantizers have, layouts within budgets, refusals by name."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from qkv_engine import CapacityError, ConfigError, ModelError
from qkv_engine.bench.plan_report import layer_rows, rung_rows
from qkv_engine.device.per_token import per_token
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.kernels.formats.graded import GradedSide
from qkv_engine.layer_kv import LayerKV
from qkv_engine.models.bases import MOST_CONDITION
from qkv_engine.plan_file import plan_bytes
from qkv_engine.planner.basis import GAIN, shrunk, solve_basis
from qkv_engine.planner.budget import ladder_of
from qkv_engine.planner.gradients import Text, profile_texts
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.moments import LayerSums, SideMoments, moments_of, scatter
from qkv_engine.planner.plan import KVPlan, read_plan
from qkv_engine.planner.predict import as_good, spectral_loss
from qkv_engine.planner.profile import Spectra
from qkv_engine.planner.sensitivity import Candidates, round_trip
from qkv_engine.planner.spectral import Spectral, choices, error, solve_spectra

from ..models.tiny import write_tiny
from .conftest import plain_model
from .profiles import made_up_profile

CONTEXT = 2**24
DIGEST = "a1" * 32
MODEL = ModelFingerprint("some", "LlamaForCausalLM", 4, 2, 128, 512, 1000, None)


def made_up_plan(budget: str, model: ModelFingerprint = MODEL, **settings: object) -> KVPlan:
    k = [[(layer + 1) * 0.5**run for run in range(8)] for layer in range(model.num_layers)]
    spectra = Spectra(0.3, k, [[energy / 10 for energy in layer] for layer in k])
    profile = replace(made_up_profile(model), spectra=spectra, bases=DIGEST)
    return KVPlan.make(Spectral(budget=budget, context=CONTEXT, **settings), profile, model)


def covariances(seed: int, size: int = 32) -> torch.Tensor:
    """Two ill-conditioned matrices."""
    x = torch.randn(2, size, 3 * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x * torch.logspace(0, -4, size, dtype=torch.float64)[:, None]
    turn = torch.linalg.qr(x[..., :size])[0] if seed % 2 else torch.eye(size, dtype=torch.float64)
    return turn @ x @ x.mT @ turn.mT / x.shape[-1]


@pytest.mark.parametrize("shrink", [0, 0.3, 1])
def test_a_basis_decorrelates_and_can_be_inverted(shrink: float):
    metric, covariance = covariances(1), covariances(2)
    basis = solve_basis(metric, covariance, shrink)
    coded = basis.matrix @ covariance @ basis.matrix.mT
    torch.testing.assert_close(coded, torch.diag_embed(basis.spectrum), rtol=1e-8, atol=1e-8)
    assert bool((basis.spectrum.diff() <= 0).all()) and bool((torch.linalg.cond(basis.matrix) < MOST_CONDITION).all())
    if shrink:  # the floor changes nothing: an error of coefficients is one of the metric
        x = torch.randn(2, 32, 1, dtype=torch.float64)
        torch.testing.assert_close((basis.matrix @ x).square().sum(1), (x.mT @ shrunk(metric, shrink) @ x)[:, 0])


def test_a_basis_of_nothing_is_one():
    nothing = torch.zeros(1, 16, 16, dtype=torch.float64)
    basis = solve_basis(nothing, nothing, 0.3)
    torch.testing.assert_close(basis.matrix @ basis.matrix.mT, torch.eye(16, dtype=torch.float64)[None])
    assert not basis.spectrum.any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gains_are_those_of_the_quantizers(bits: int):
    x = torch.randn(1024, 1, 128, 16, generator=torch.Generator().manual_seed(0))
    side = make_format(f"graded-16x{bits}", torch.float32).layout(PageShape(1, 128, 16), "k")
    left = (round_trip(x, side) - x).square().mean() / x.var(2).mean()
    assert float(left) == pytest.approx(GAIN[bits], rel=0.03)


def test_scatter_is_around_the_mean_of_each_block():
    x = torch.randn(300, 2, 4) + 5
    wanted = sum(torch.einsum("thd,the->hde", *[b.double() - b.double().mean(0)] * 2) for b in x.split(128))
    torch.testing.assert_close(scatter(x), wanted)
    assert scatter(x[:0]).shape == (2, 4, 4)


def test_moments_of_a_model_give_bases(tmp_path: Path):
    model = plain_model(write_tiny(tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=2))
    sums = [LayerSums(spec.scale) for spec in model.config.attention]
    with pytest.raises(ConfigError, match=r"max_tokens.*behind the sink"):
        moments_of(model, sums)
    ids = torch.randint(3, 60, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    (found,) = profile_texts(model, [Text(ids)], [Candidates({}, {})] * 2, moments=sums)
    moments = moments_of(model, sums)
    assert found.loss > 0 and len(moments) == 2
    for side in chain(*moments):
        assert all(x.shape == (2, 16, 16) and x.dtype == torch.float64 and x.any() for x in vars(side).values())
    bases, spectra = solve_spectra(moments, 0.3)
    assert [x.shape for layer in bases for x in layer] == [(2, 16, 16), (2, 16, 16), (2, 16), (2, 16)] * 2
    coded = bases[0].k.double() @ moments[0][0].covariance @ bases[0].k.double().mT
    torch.testing.assert_close(coded.diagonal(dim1=1, dim2=2).float(), bases[0].k_variance, rtol=1e-3, atol=1e-6)
    assert all(len(layer) == 1 and layer[0] > 0 for layer in (*spectra.k, *spectra.v))
    sums[0].scatters[0][0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        moments_of(model, sums)


def test_energies_share_the_change_of_the_loss():
    moments = SideMoments(covariances(1), covariances(2), covariances(3))
    _, spectra = solve_spectra([(moments, moments)], 0.3)
    whole = (moments.gradient * moments.covariance).sum((-2, -1)).sqrt().sum()
    assert sum(spectra.k[0]) == pytest.approx(float(whole), rel=1e-5) and spectra.k[0][0] > spectra.k[0][1]


def test_errors_fall_with_bits_and_bytes():
    layer, energies = LayerKV(8, 128), [0.4**run for run in range(8)]
    for wide, narrow in pairwise((8, 4, 2, 1, 0)):
        assert error([wide] * 8, energies) < error([narrow] * 8, energies)
    shape = PageShape(8, 128, 128)
    for side, least, step in (("k", "graded-32x1", 32), ("v", "graded-16x1", 16)):
        found = choices(layer, side, energies)
        assert all(a.nbytes < b.nbytes and a.cost > b.cost for a, b in pairwise(found))
        assert found[0].name == least and found[-1].name == "int8-channel-128"
        for choice in found:
            layout = make_format(choice.name, torch.bfloat16).layout(shape, side)
            assert layout.nbytes == choice.nbytes
            assert not isinstance(layout, GradedSide) or all(run.channels % step == 0 for run in layout.runs)


@pytest.mark.parametrize("budget", ["1.25bits", "1.75bits", "2.5bits", "5bits"])
def test_a_floor_fits_its_budget(budget: str):
    plan = made_up_plan(budget)
    ladder = ladder_of(plan.config("plan"), MODEL)
    bits = per_token(ladder, ladder.last, 8192).bits
    assert float(budget.removesuffix("bits")) - 0.06 < bits <= float(budget.removesuffix("bits"))
    floor = plan.config("plan").rungs[-1]
    assert floor.name == "spectral" and len(set(floor.k)) > 1
    costs = [choice.cost for choice in choices(MODEL.kv_of_layers[0], "k", plan.profile.spectra.k[3])]
    assert costs == sorted(costs, reverse=True)


def test_the_predicted_loss_of_a_rung_is_what_its_floor_was_solved_for():
    plan = made_up_plan("2bits")
    spectra, rungs = plan.profile.spectra, plan.config("plan").rungs
    assert isinstance(spectra, Spectra) and spectral_loss(rungs[0], spectra) is None
    energies = sum(map(sum, (*spectra.k, *spectra.v)))
    assert spectral_loss(rungs[1], spectra) == pytest.approx(GAIN[8] * energies)
    costs = 0.0
    for side, names in (("k", rungs[3].k), ("v", rungs[3].v)):
        for name, layer, each in zip(names, MODEL.kv_of_layers, getattr(spectra, side), strict=True):
            costs += next(choice.cost for choice in choices(layer, side, each) if choice.name == name)
    assert spectral_loss(rungs[3], spectra) == pytest.approx(costs) and costs > spectral_loss(rungs[2], spectra)
    assert [row.loss for row in rung_rows(plan)] == [spectral_loss(rung, spectra) for rung in rungs]
    assert layer_rows(plan)[2].k_nats == pytest.approx(GAIN[2] * sum(spectra.k[2]))
    assert not dict(as_good(plan)), "sensitivities and costs are not compared"


def test_rungs_lead_to_the_floor_one_by_one():
    kv = made_up_plan("2bits").config("plan")
    assert [rung.name for rung in kv.rungs] == ["dense16", "int8", "int4", "spectral"]
    assert (kv.sink, kv.recent, kv.eager) == (32, 128, False) and set(kv.rungs[1].k) == {"int8-channel-128"}
    for above, floor in zip(kv.rungs[2].k + kv.rungs[2].v, kv.rungs[3].k + kv.rungs[3].v, strict=True):
        assert above == f"int{8 if 'x8' in floor else 4}-channel-128"
    eager = made_up_plan("2bits", eager=True).config("plan")
    assert [rung.name for rung in eager.rungs] == ["dense16", "spectral"] and eager.eager
    assert [rung.name for rung in made_up_plan("12bits").config("plan").rungs] == ["dense16", "spectral"]


def test_blocks_of_windows_keep_8_bits():
    layers = (LayerKV(2, 128, 4096), LayerKV(2, 128), LayerKV(2, 128, 4096), LayerKV(2, 128))
    floor = made_up_plan("4bits", msgspec.structs.replace(MODEL, layers=layers)).config("plan").rungs[-1]
    assert floor.k[::2] == floor.v[::2] == ("int8-channel-128",) * 2 and "graded" in floor.k[1]


def test_layers_may_differ_in_their_heads(tmp_path: Path):
    model = msgspec.structs.replace(MODEL, layers=(LayerKV(2, 128), LayerKV(1, 256)) * 2)
    spectra = Spectra(0.3, *[[[0.5**run for run in range(runs)] for runs in (8, 16, 8, 16)]] * 2)
    profile = replace(made_up_profile(model), spectra=spectra, bases=DIGEST)
    plan = KVPlan.make(Spectral(budget="2bits", context=CONTEXT), profile, model)
    (tmp_path / "plan.json").write_bytes(plan_bytes(plan))
    assert read_plan(tmp_path / "plan.json") == plan


def test_other_plans_know_nothing_of_bases(tmp_path: Path):
    plan = made_up_plan("2bits")
    assert plan.method == "spectral" and len(plan_bytes(plan)) < 20_000
    mixed = KVPlan.make(Mixed(budget="3bits", context=CONTEXT), plan.profile, MODEL)
    plain = KVPlan.make(Mixed(budget="3bits", context=CONTEXT), made_up_profile(MODEL), MODEL)
    assert plan_bytes(mixed) == plan_bytes(plain) and b"spectra" not in plan_bytes(plain)
    assert b"bases" not in plan_bytes(plain)


def test_what_cannot_be_solved_is_named():
    with pytest.raises(CapacityError, match=r"budget='0.2bits': no plan is as small. Give at least 0\.\d+bits"):
        made_up_plan("0.2bits")
    with pytest.raises(ConfigError, match=r"shrink=0.5: the bases have another. Give 0.3"):
        made_up_plan("2bits", shrink=0.5)
    for shrink in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"shrink=.*from 0 to 1"):
            Spectral(budget="2bits", context=CONTEXT, shrink=shrink)
    with pytest.raises(ConfigError, match=r"no spectra.*--method spectral"):
        Spectral(budget="2bits", context=CONTEXT).solve(made_up_profile(MODEL), MODEL)
    odd = msgspec.structs.replace(MODEL, head_dim=24)
    with pytest.raises(ConfigError, match="16 must divide"):
        made_up_plan("2bits", odd)


def test_a_file_with_other_runs_is_refused():
    plan = made_up_plan("2bits")
    short = replace(plan.profile.spectra, v=[[1.0] * 7] * 4)
    with pytest.raises(ValueError, match="spectra has 7 entries for 8 runs"):
        replace(plan, profile=replace(plan.profile, spectra=short))
    with pytest.raises(ValueError, match=r"spectra.k has 3 entries for 4 layers"):
        replace(plan, profile=replace(plan.profile, spectra=replace(short, k=[[1.0] * 8] * 3)))
