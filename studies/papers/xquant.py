"""XQuant by its own rules: KIVI at 2 and 1 bits by layer, levels drawn in, and codes shared with the layer above.

Source:  XQuant (arXiv 2510.11236), eq. 9 and 12 and the Qwen2 model file, which has 32 layers written into it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from qkv_engine.config import DENSE16, KVConfig, RungConfig

from . import quantizers
from .cache import LayerCache, Quantize, Scheme, Side, by_channel, by_token
from .kivi import GROUP, RESIDUAL
from .quantizers import Codes

ETAS = {1: 1 / 6, 2: 0.045}  # by bits, share of the range between an end and its level: the paper's static pair


class Setting(NamedTuple):
    """First layers that have 2 bits, K and V; first layers whose codes are their own, K and V."""

    kq: int
    vq: int
    km: int
    vm: int


def largest(num_layers: int) -> Setting:
    """The setting of 1.375 code bits, (30, 2, 32, 16) for 32 layers."""
    return Setting(num_layers - 2, 2, num_layers, num_layers // 2)


def calibrated(codes: Codes, bits: int, eta: float) -> Codes:
    """The codes with minimum + eta (2^bits - 1) step and (1 - 2 eta) step, in fp16."""
    return Codes(codes.codes, (1 - 2 * eta) * codes.step, codes.minimum + eta * (2**bits - 1) * codes.step)


class SideCodes:
    """Quantizers of one side of all layers, which settle the same tokens one after the other in each step.

    ``sharing``: layers that have one set of codes, the lowest one's (the paper's G, with k = 0).
    """

    def __init__(self, num_wide: int, num_single: int, etas: Mapping[int, float], sharing: int = 2):
        self.num_wide, self.num_single, self.etas, self.sharing = num_wide, num_single, etas, sharing
        self._below: Tensor | None = None  # codes of the last layer that made its own

    def of_layer(self, layer: int) -> Quantize:
        """Layer ``layer``: from ``num_single`` on the first of each group has codes, the others its with own ranges."""
        bits = 2 if layer < self.num_wide else 1
        is_subordinate = layer >= self.num_single and (layer - self.num_single) % self.sharing > 0

        def quantize(groups: Tensor) -> Tensor:
            found = quantizers.kivi(groups, bits)
            if is_subordinate:
                assert self._below is not None, "the layer below settles first"
                found = found._replace(codes=self._below)
            self._below = found.codes
            return calibrated(found, bits, self.etas[bits]).values()

        return quantize


def scheme(setting: Setting, preset: KVConfig | None, *, etas: Mapping[int, float] = ETAS, sharing: int = 2) -> Scheme:
    """XQuant with ``setting`` in groups of 32, beside the engine's ``preset``; V's codes in groups of layers."""
    keys, values = SideCodes(setting.kq, setting.km, etas), SideCodes(setting.vq, setting.vm, etas, sharing)

    def layer(number: int) -> LayerCache:
        return LayerCache(
            Side(lambda full: full // RESIDUAL * RESIDUAL, by_channel(keys.of_layer(number), GROUP)),
            Side(lambda full: max(0, full - RESIDUAL), by_token(values.of_layer(number), GROUP)),
        )

    return Scheme(layer, preset)


def two_and_one(num_layers: int, *, etas: Mapping[int, float] = ETAS) -> Scheme:
    """K at 2 bits and V at 1 in all layers, which AsymKV (arXiv 2410.13212) has in some; beside blocks of the same."""
    names = {1: "1/6", 2: "0.045"} if etas is ETAS else {}
    k, v = (f"-eta{names[bits]}" if names else "" for bits in (2, 1))
    rung = RungConfig("k2v1", f"int2-channel-{GROUP}{k}", f"int1-token-{GROUP}{v}")
    preset = KVConfig(name=f"k2v1{'-eta' if names else ''}", rungs=(DENSE16, rung), recent=RESIDUAL, eager=True)
    return scheme(Setting(num_layers, 0, num_layers, num_layers), preset, etas=etas)
