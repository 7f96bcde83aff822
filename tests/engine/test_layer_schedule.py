"""Formats by layer for any number of layers, XQuant's presets, and pairs of layers that cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from qkv_engine import ConfigError, KVConfig, RungConfig
from qkv_engine.config import DENSE16
from qkv_engine.device.layouts import Rung, build_ladder
from qkv_engine.kernels.formats.uniform.presets import XQUANT, uniform_rung, xquant_rung
from qkv_engine.layer_schedule import LayerSchedule
from qkv_engine.presets import PRESETS

WIDE, NARROW = "int2-token-32", "int1-token-32"
SHARED = "int1-token-32-subordinate"


def rung_of(config: KVConfig, num_layers: int) -> Rung:
    return build_ladder(config, num_layers=num_layers, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16).narrowest


def refusal(rung: RungConfig, num_layers: int = 2) -> ConfigError:
    """The error of a ladder that ends in ``rung``."""
    with pytest.raises(ConfigError) as caught:
        rung_of(KVConfig(name="mine", rungs=(DENSE16, rung)), num_layers)
    return caught.value


def mean_code_bits(extents: tuple[Any, Any, Any], num_layers: int) -> float:
    """Mean over K and V of all layers; a subordinate side has none."""
    config = KVConfig(name="x", rungs=(DENSE16, xquant_rung("x", extents, 128, ("0", "0"))))
    rung = rung_of(config, num_layers)
    return 8 * rung.codes_nbytes / rung.num_elements


@pytest.mark.parametrize(
    ("kq", "vq", "vm", "bits"),
    [
        (30, 2, 16, 1.375),
        (28, 0, 28, 1.40625),
        (32, 0, 16, 1.375),
        (32, 0, 20, 1.40625),
        (32, 0, 4, 1.28125),
        (26, 0, 16, 1.28125),
        (24, 0, 4, 1.15625),
    ],
)
def test_code_bits_of_the_papers_settings(kq: int, vq: int, vm: int, bits: float):
    assert mean_code_bits((kq, vq, vm), 32) == bits


@pytest.mark.parametrize(("name", "bits"), [("xquant", 1.375), ("xquant-1.28", 1.28125), ("xquant-1.16", 1.15625)])
def test_presets_of_32_layers_have_the_bits_of_their_names(name: str, bits: float):
    assert mean_code_bits(XQUANT[name], 32) == bits
    for suffix, meta, sink in (("", 0.25, 0), ("-g32", 1, 0), ("-sink", 0.25, 32), ("-g32-sink", 1, 32)):
        preset = PRESETS[name + suffix]
        rung = rung_of(preset, 32)
        assert 8 * rung.codes_nbytes / rung.num_elements == bits
        assert rung.effective_bits == pytest.approx(bits + meta, abs=0.01)  # the largest ranges, padding
        assert rung.bits == 1 and (preset.sink, preset.recent, preset.eager) == (sink, 128, True)
        assert {f.eta > 0 for pair in rung.layers for f in pair} == {True}


@pytest.mark.parametrize("num_layers", [4, 8, 12, 28, 36, 40, 48, 64, 80])
def test_the_largest_setting_has_its_bits_with_any_multiple_of_four_layers(num_layers: int):
    assert mean_code_bits(XQUANT["xquant"], num_layers) == 1.375


@pytest.mark.parametrize("num_layers", range(1, 41))
@pytest.mark.parametrize("name", XQUANT)
def test_every_number_of_layers_has_pairs_of_one_width(name: str, num_layers: int):
    rung = PRESETS[name].rungs[1]
    rung_of(PRESETS[name], num_layers)
    k, v = (side.formats(num_layers) for side in (rung.k, rung.v))
    assert len(k) == len(v) == num_layers and not any("subordinate" in name for name in k)
    shared = [layer for layer, name in enumerate(v) if "subordinate" in name]
    assert all(layer % 2 and v[layer] == f"{v[layer - 1]}-subordinate" for layer in shared)
    if num_layers % 2:
        assert num_layers - 1 not in shared


def test_layers_of_a_schedule():
    make = LayerSchedule(WIDE, NARROW, 2, Fraction(1, 2)).formats
    assert make(0) == () and make(1) == (WIDE,)
    assert make(7) == (WIDE, WIDE, NARROW, NARROW, NARROW, SHARED, NARROW)
    assert make(8) == (*make(7), SHARED)
    assert LayerSchedule(WIDE, NARROW, -2).formats(5) == (WIDE,) * 4 + (NARROW,)
    assert LayerSchedule(WIDE, NARROW, Fraction(1)).formats(7) == (WIDE,) * 7
    assert LayerSchedule(WIDE, NARROW, 99, 0).formats(3) == (WIDE, f"{WIDE}-subordinate", WIDE)
    assert LayerSchedule(WIDE, NARROW, -99).formats(3) == (NARROW,) * 3


def test_a_schedule_is_a_value():
    one, same = (PRESETS["xquant"], replace(PRESETS["xquant"]))
    assert one == same and hash(one) == hash(same) and repr(one) == repr(same)
    assert eval(repr(one.rungs[1].v)) == one.rungs[1].v
    assert len({preset.rungs[1] for name, preset in PRESETS.items() if "xquant" in name}) == 6


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("wide", [None, 2, ("int2-token-32",)]),
        ("narrow", [None, b"int1"]),
        ("num_wide", [None, "2", 2.0, True, Fraction(-1, 2), Fraction(3, 2)]),
        ("num_single", [None, "half", 0.5, False, Fraction(9, 8)]),
    ],
)
def test_every_field_of_a_schedule_is_checked(field: str, values: list[Any]):
    fields = {"wide": WIDE, "narrow": NARROW, "num_wide": 2, "num_single": 0}
    for value in values:
        with pytest.raises(ConfigError, match=f"^{field}=") as caught:
            LayerSchedule(**fields | {field: value})
        assert caught.value.remedy


@pytest.mark.parametrize(
    ("v", "num_layers", "where"),
    [
        ((SHARED, NARROW), 2, "V of layer 0"),
        ((NARROW, SHARED, SHARED), 3, "V of layer 2"),  # a pair that overlaps the one before
        ((WIDE, SHARED), 2, "V of layer 1"),  # a pair of two widths
        ((NARROW, SHARED, f"{WIDE}-subordinate"), 3, "V of layer 2"),
        ((NARROW, "int1-token-64-subordinate"), 2, "V of layer 1"),
        ((f"{NARROW}-eta1/6", SHARED), 2, "V of layer 1"),
        (("dense16", SHARED), 2, "V of layer 1"),
    ],
)
def test_pairs_that_cannot_be(v: tuple[str, ...], num_layers: int, where: str):
    error = refusal(RungConfig("x", "int2-channel-32", v), num_layers)
    assert (error.field, error.value) == ("kv", "mine") and where in str(error) and "layer below" in error.remedy


@pytest.mark.parametrize("num_layers", [7, 9, 2])
def test_a_schedule_of_pairs_is_for_its_number_of_layers(num_layers: int):
    error = refusal(RungConfig("x", "int2-channel-32", (NARROW, SHARED) * 4), num_layers)
    assert f"8 formats for {num_layers} layers" in str(error) and "one a layer" in error.remedy


@pytest.mark.parametrize("eta", ["1/2", "0.5", "2/3", "-0.1", "x"])
@pytest.mark.parametrize("scheduled", [True, False])
def test_etas_outside_their_range(eta: str, scheduled: bool):
    name = f"int1-token-32-eta{eta}"
    error = refusal(RungConfig("x", "int2-channel-32", LayerSchedule(name, name, 2) if scheduled else name))
    assert re.search("eta='.+': (outside its range|not a number)", str(error)) and "less than 1/2" in error.remedy


def test_unknown_formats_of_a_schedule():
    error = refusal(RungConfig("x", LayerSchedule("int2-channel-32", "int5", 0), "int2-token-32"))
    assert "format='int5'" in str(error) and "int2-token-32" in error.remedy


def test_a_ladder_narrows_to_shared_codes_and_never_back():
    build_rungs = (DENSE16, uniform_rung(8), uniform_rung(4), PRESETS["xquant"].rungs[1])
    assert rung_of(KVConfig(name="mine", rungs=build_rungs), 8).bits == 1
    with pytest.raises(ConfigError, match="V of layer 5 grows"):
        rung_of(KVConfig(name="mine", rungs=(DENSE16, PRESETS["xquant"].rungs[1], uniform_rung(1))), 8)
