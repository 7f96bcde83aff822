"""XQuant by its own rules: KIVI at 2 and 1 bits by layer, levels drawn in, and codes shared with the layer above.

Source:  XQuant (arXiv 2510.11236), eq. 9 and 12 and the Qwen2 model file, which has 32 layers written into it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from qkv_engine.config import KVConfig

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
    """Quantizers of one side of all layers, which settle the same tokens one after the other in each step."""

    def __init__(self, num_wide: int, num_single: int, etas: Mapping[int, float]):
        self.num_wide, self.num_single, self.etas = num_wide, num_single, etas
        self._below: Tensor | None = None  # codes of the last layer that made its own

    def of_layer(self, layer: int) -> Quantize:
        """Layer ``layer``: an odd one from ``num_single`` on has its own step and minimum with the codes below."""
        bits = 2 if layer < self.num_wide else 1
        is_subordinate = layer % 2 == 1 and layer >= self.num_single

        def quantize(groups: Tensor) -> Tensor:
            found = quantizers.kivi(groups, bits)
            if is_subordinate:
                assert self._below is not None, "the layer below settles first"
                found = found._replace(codes=self._below)
            self._below = found.codes
            return calibrated(found, bits, self.etas[bits]).values()

        return quantize


def scheme(setting: Setting, preset: KVConfig | None, *, etas: Mapping[int, float] = ETAS) -> Scheme:
    """XQuant with ``setting`` in groups of 32, beside the engine's ``preset``."""
    keys, values = SideCodes(setting.kq, setting.km, etas), SideCodes(setting.vq, setting.vm, etas)

    def layer(number: int) -> LayerCache:
        return LayerCache(
            Side(lambda full: full // RESIDUAL * RESIDUAL, by_channel(keys.of_layer(number), GROUP)),
            Side(lambda full: max(0, full - RESIDUAL), by_token(values.of_layer(number), GROUP)),
        )

    return Scheme(layer, preset)
