"""Predictions from a profile: the loss of a rung, and presets that would lose no more in no more bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import PRESETS, KVConfig, RungConfig
from ..errors import ConfigError
from ..kv.ladder import SIDES
from .budget import ladder_of
from .plan import KVPlan
from .profile import Profile

AS_GOOD = 1.02  # of a plan's predicted loss: a preset below it is as good, for all that a profile can tell
OUTLIERS = 8.0  # largest over median channel from which on K per token loses its other channels at few bits


def predicted_loss(rung: RungConfig, profile: Profile) -> float | None:
    """The sum of sensitivities in nats to the formats of ``rung``; None if one of them was not profiled.

    To first order the mean loss of a token changes by no more, on texts like those of the profile.
    """
    total, num_layers = 0.0, len(profile.key_outliers)
    for side in SIDES:
        each, known = rung.formats(side, num_layers), getattr(profile.sensitivities, side)
        if not all(name in known for name in each):
            return None
        total += sum(known[name][layer] for layer, name in enumerate(each))
    return total


def as_good(plan: KVPlan) -> Iterator[tuple[str, float]]:
    """Presets of no more bytes a block at the floor and about the predicted loss or less, each with its own."""
    kv = plan.config("plan")
    loss = predicted_loss(kv.rungs[-1], plan.profile)
    if loss is None:
        return
    nbytes = ladder_of(kv, plan.model).narrowest.block_nbytes
    for preset in PRESETS.values():
        theirs = predicted_loss(preset.rungs[-1], plan.profile)
        if theirs is not None and theirs <= AS_GOOD * loss and _floor_nbytes(preset, plan) <= nbytes:
            yield preset.name, theirs


def outlier_layers(profile: Profile) -> list[int]:
    """Layers of a model without q/k norm whose K has channels far larger than the median one."""
    if profile.has_qk_norm:
        return []
    return [layer for layer, ratio in enumerate(profile.key_outliers) if ratio >= OUTLIERS]


def _floor_nbytes(preset: KVConfig, plan: KVPlan) -> float:
    try:
        return ladder_of(preset, plan.model).narrowest.block_nbytes
    except ConfigError:  # does not fit these heads
        return float("inf")
