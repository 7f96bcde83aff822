"""KVmix's choice of layers: the published averages, apart for K and V, and the random control."""

from __future__ import annotations

from statistics import fmean

import pytest

from qkv_engine import ConfigError
from qkv_engine.config import KVConfig
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.profile import LayerScores


def widths(kv: KVConfig, side: str) -> list[int]:
    """Bits of a side of each layer, from names such as "int3-channel-32"."""
    return [int(name.split("-")[0].removeprefix("int")) for name in getattr(kv.rungs[-1], side)]


def scores(num_layers: int) -> LayerScores:
    """K rises and V falls with the layer."""
    return LayerScores([float(layer) for layer in range(num_layers)], [float(-layer) for layer in range(num_layers)])


@pytest.mark.parametrize(("share", "k_bits", "v_bits"), [(0.2, 2.1875, 2.375), (0.3, 2.28125, 2.5625), (0.0, 2, 2)])
def test_published_averages_of_32_layers(share: float, k_bits: float, v_bits: float):
    """Golden check 20."""
    kv = KVmix(share=share).ladder("plan", scores(32))
    assert (fmean(widths(kv, "k")), fmean(widths(kv, "v"))) == (k_bits, v_bits)


@pytest.mark.parametrize(
    ("share", "num_layers", "number"),
    [(0.2, 8, 1), (0.2, 28, 5), (0.2, 36, 7), (0.3, 40, 12), (0.29, 100, 29), (0.01, 8, 1), (0, 8, 0), (1, 8, 8)],
)
def test_the_share_is_exact_and_rounded_down(share: float, num_layers: int, number: int):
    """0.29 * 100 is 28.999999999999996 in floating point."""
    assert KVmix(share=share).num_chosen(num_layers) == number


def test_k_and_v_are_ranked_apart():
    kv = KVmix(share=0.5, k_bits=4, v_bits=8, group=64).ladder("mine", scores(4))
    assert kv.name == "mine" and kv.eager and [rung.name for rung in kv.rungs] == ["dense16", "kvmix"]
    assert kv.rungs[1].k == ("int2-channel-64", "int2-channel-64", "int4-channel-64", "int4-channel-64")
    assert kv.rungs[1].v == ("int8-token-64", "int8-token-64", "int2-token-64", "int2-token-64")


def test_of_equal_scores_the_first_layers_are_chosen():
    assert widths(KVmix(share=0.5).ladder("plan", LayerScores([1.0] * 4, [1.0] * 4)), "k") == [3, 3, 2, 2]


def test_random_layers_are_as_many_and_repeat_by_seed():
    drawn = [widths(KVmix(random_seed=seed).ladder("plan", scores(32)), "k") for seed in (0, 0, 1, 2)]
    assert all(sum(bits) == 26 * 2 + 6 * 3 for bits in drawn)
    assert drawn[0] == drawn[1] and len({tuple(bits) for bits in drawn}) == 3


def test_windows_go_into_the_ladder():
    kv = KVmix(sink=32, recent=128).ladder("plan", scores(4))
    assert (kv.sink, kv.recent, kv.recent_ratio, kv.eager) == (32, 128, 0.0, True)
    for field, value in (("sink", 3), ("recent", -1), ("recent_ratio", 1.0)):
        with pytest.raises(ConfigError, match=f"{field}={value}"):
            KVmix(**{field: value})


def test_the_recent_ratio_goes_into_the_ladder():
    assert KVmix(recent_ratio=0.1).ladder("plan", scores(4)).recent_ratio == 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("share", value) for value in (-0.1, 1.01, float("nan"))],
        *[("recent_ratio", value) for value in (-0.1, 1.0, float("nan"))],
        *[(field, value) for field in ("k_bits", "v_bits", "low_bits") for value in (0, 5, 16)],
        ("group", 11),
        ("low_bits", 4),
    ],
)
def test_settings_out_of_range_name_field_and_remedy(field: str, value: float):
    with pytest.raises(ConfigError, match=rf"{field}=.*\. (Give|Choose)"):
        KVmix(**{field: value})
