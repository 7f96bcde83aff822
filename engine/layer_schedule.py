"""Formats of one side layer by layer, for a model of any number of layers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor

from .errors import ConfigError

# Layers from the first on: a number, counted from the end if negative, or a share of all.
LayerCount = int | Fraction
ALL = Fraction(1)


@dataclass(frozen=True)
class LayerSchedule:
    """XQuant's choice of formats: wide layers first, narrow ones after them, and codes shared in pairs of layers.

    Extents become the nearest even number of layers, of two the larger, so no pair has two widths. A last layer
    without a pair has codes of its own. Raises ``ConfigError`` for a value of the wrong type or out of range.
    Source: XQuant (arXiv 2510.11236).

    Fields
        wide, narrow: formats with codes of their own, such as "int2-token-32-eta0.045".
        num_wide: the first layers, which have the wide format.
        num_single: the first layers, which have codes of their own; every odd layer after them uses the layer below's.
    """

    wide: str
    narrow: str
    num_wide: LayerCount
    num_single: LayerCount = ALL

    def __post_init__(self) -> None:
        for field in ("wide", "narrow"):
            value = getattr(self, field)
            if not isinstance(value, str):
                remedy = 'Give the name of a format such as "int2-token-128"'
                raise ConfigError("not a format", field=field, value=value, remedy=remedy)
        for field in ("num_wide", "num_single"):
            value = getattr(self, field)
            is_share = isinstance(value, Fraction) and 0 <= value <= 1
            if not is_share and type(value) is not int:
                remedy = "Give a number of layers, from the end if negative, or a Fraction from 0 to 1"
                raise ConfigError("not a number of layers", field=field, value=value, remedy=remedy)

    def formats(self, num_layers: int) -> tuple[str, ...]:
        """The names of the formats of ``num_layers`` layers."""
        num_wide, num_single = (_even(extent, num_layers) for extent in (self.num_wide, self.num_single))
        names = [self.wide if layer < num_wide else self.narrow for layer in range(num_layers)]
        return tuple(
            f"{name}-subordinate" if layer % 2 and layer >= num_single else name for layer, name in enumerate(names)
        )


def _even(extent: LayerCount, num_layers: int) -> int:
    """The even number nearest to ``extent`` of ``num_layers``, halves up; one layer beyond the last means all."""
    exact = extent * num_layers if isinstance(extent, Fraction) else extent + num_layers * (extent < 0)
    return 2 * floor(Fraction(exact) / 2 + Fraction(1, 2))
