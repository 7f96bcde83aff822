"""Predictions from a profile: the loss of a rung, and presets that would lose no more in no more bytes."""

from __future__ import annotations

from collections.abc import Iterator

from qkv_engine.config import RungConfig
from qkv_engine.device.layouts import SIDES
from qkv_engine.device.per_token import per_token
from qkv_engine.errors import ConfigError
from qkv_engine.presets import PRESETS

from .budget import ladder_of
from .plan import KVPlan
from .profile import Profile, Spectra
from .spectral import error, widths_of

AS_GOOD = 1.02  # times a plan's predicted loss: up to there a preset is called as good, since no profile tells better
OUTLIERS = 8.0  # K's largest over its median channel; from here K per token at few bits loses its other channels


def predicted_loss(rung: RungConfig, profile: Profile) -> float | None:
    """The predicted loss of ``rung``, the sum of its formats' sensitivities in nats; None if one was not profiled.

    To first order the mean loss of a token changes by no more, on texts like the profile's.
    """
    total, num_layers = 0.0, len(profile.key_outliers)
    for side in SIDES:
        each, known = rung.formats(side, num_layers), getattr(profile.sensitivities, side)
        if not all(name in known for name in each):
            return None
        total += sum(known[name][layer] for layer, name in enumerate(each))
    return total


def spectral_loss(rung: RungConfig, spectra: Spectra) -> float | None:
    """The predicted loss of a ``rung`` in bases, the cost that its plan was solved for; None for a dense side.

    Not of first order, as ``predicted_loss`` is: the two cannot be compared.
    """
    total = 0.0
    for side in SIDES:
        energies = getattr(spectra, side)
        for name, each in zip(rung.formats(side, len(energies)), energies, strict=True):
            widths = widths_of(name, len(each))
            if widths is None:
                return None
            total += error(widths, each)
    return total


def as_good(plan: KVPlan) -> Iterator[tuple[str, float]]:
    """Presets that are no larger at the floor and predicted to lose about as little: (name, predicted loss)."""
    kv = plan.config("plan")
    ladder = ladder_of(kv, plan.model)
    loss = predicted_loss(ladder.stored(ladder.last), plan.profile)
    nbytes = per_token(ladder, ladder.last, plan.context).nbytes
    if loss is None:
        return
    for preset in PRESETS.values():
        try:
            other = ladder_of(preset, plan.model)
        except ConfigError:  # does not fit these heads
            continue
        theirs = predicted_loss(other.stored(other.last), plan.profile)
        is_smaller = per_token(other, other.last, plan.context).nbytes <= nbytes
        if is_smaller and theirs is not None and theirs <= AS_GOOD * loss:
            yield preset.name, theirs


def outlier_layers(profile: Profile) -> list[int]:
    """Layers of a model without q/k norm whose K has channels far larger than the median one."""
    if profile.has_qk_norm:
        return []
    return [layer for layer, ratio in enumerate(profile.key_outliers) if ratio >= OUTLIERS]
