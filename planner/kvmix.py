"""KVmix: more bits for the K and the V of the layers whose weights have the largest loss gradients.

Source: KVmix (arXiv 2506.08018).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.layer_kv import WINDOW_BITS

from .profile import LayerScores, Profile

WIDTHS = (1, 2, 3, 4, 8)  # code bits that uniform sides have
GROUPS = (32, 64, 128)  # elements that share a minimum and a range


class KVmix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="kvmix"):
    """Settings of KVmix, which turns scores into formats. Raises ``ConfigError`` for a value out of range.

    ``share`` of the layers, chosen for K and for V apart, have ``k_bits`` and ``v_bits``, the others ``low_bits``.
    ``group`` elements share a minimum and a range. A request's first ``sink`` tokens stay dense, and its newest:
    ``recent`` tokens, or ``recent_ratio`` of the context where that is more. ``random_seed`` draws the layers, the
    control; None ranks them by score.
    """

    share: float = 0.2
    k_bits: int = 3
    v_bits: int = 4
    low_bits: int = 2
    group: int = 32
    sink: int = 0
    recent: int = 0
    recent_ratio: float = 0.0
    random_seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError("out of range", field="share", value=self.share, remedy="Give a share from 0 to 1")
        if not 0 <= self.recent_ratio < 1:
            remedy = "Give a share from 0 up to, but not including, 1"
            raise ConfigError("out of range", field="recent_ratio", value=self.recent_ratio, remedy=remedy)
        self._ladder("plan", (DENSE16,))  # checks the windows
        for field, choices in (("k_bits", WIDTHS), ("v_bits", WIDTHS), ("low_bits", WIDTHS), ("group", GROUPS)):
            value = getattr(self, field)
            if value not in choices:
                remedy = f"Choose from {', '.join(map(str, choices))}"
                raise ConfigError("not supported", field=field, value=value, remedy=remedy)
        least = min(self.k_bits, self.v_bits)
        if self.low_bits > least:
            remedy = f"Give at most {least}, the fewest of k_bits and v_bits"
            raise ConfigError("more than the chosen layers have", field="low_bits", value=self.low_bits, remedy=remedy)

    def num_chosen(self, num_layers: int) -> int:
        """Layers with more bits: the share rounded down, at least one of any share above 0."""
        return max(math.floor(Fraction(str(self.share)) * num_layers), int(self.share > 0))

    def solve(self, profile: Profile, model: ModelFingerprint) -> KVConfig:
        """The ladder that follows from the scores of ``profile``.

        Raises ``ConfigError`` if no layer's blocks take so few bits, since all have windows.
        """
        layers = enumerate(model.kv_of_layers)
        narrow = [layer for layer, kv in layers if kv.least_bits(self.low_bits) == self.low_bits]
        if not narrow:
            message = f"all layers have windows, whose blocks keep {WINDOW_BITS} bits"
            raise ConfigError(message, field="low_bits", value=self.low_bits, remedy="Serve the model without a plan")
        return self.ladder("plan", profile.scores, narrow)

    def ladder(self, name: str, scores: LayerScores, narrow: Sequence[int] | None = None) -> KVConfig:
        """The eager ladder called ``name`` that ``scores`` lead to: K in groups of tokens, V in groups of channels.

        ``narrow``: the layers among which those with more bits are chosen; None for all.
        """
        among = range(len(scores.k)) if narrow is None else narrow
        k = tuple(f"int{bits}-channel-{self.group}" for bits in self._widths(scores.k, self.k_bits, "k", among))
        v = tuple(f"int{bits}-token-{self.group}" for bits in self._widths(scores.v, self.v_bits, "v", among))
        return self._ladder(name, (DENSE16, RungConfig("kvmix", k, v)))

    def _ladder(self, name: str, rungs: tuple[RungConfig, ...]) -> KVConfig:
        return KVConfig(
            name=name, rungs=rungs, sink=self.sink, recent=self.recent, recent_ratio=self.recent_ratio, eager=True
        )

    def _widths(self, scores: Sequence[float], high: int, side: str, among: Sequence[int]) -> list[int]:
        chosen = self._choose(scores, side, among)
        return [high if layer in chosen else self.low_bits for layer in range(len(scores))]

    def _choose(self, scores: Sequence[float], side: str, layers: Sequence[int]) -> set[int]:
        """Those of ``layers`` with the highest scores, of equal ones the first; or as many at random."""
        number = self.num_chosen(len(layers))
        if self.random_seed is not None:
            return set(random.Random(f"{self.random_seed} {side}").sample(layers, number))
        return set(sorted(layers, key=lambda layer: -scores[layer])[:number])
