"""Model profiles: how much the loss depends on K and V of each layer, and on the errors of each format there.

Sensitivity of a side to a format: the sum over its elements of |error x gradient|, in nats. To first order the mean
loss of a text changes by no more. Source: PM-KVQ (arXiv 2505.18610), whose mean over elements ranks layers alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

import msgspec

from qkv_engine.errors import ModelError
from qkv_engine.plan_file import Digest, KeyScale, Strict

MAX_FORMATS = 256  # that a profile names, several times those there are

Norm = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
ByFormat = Annotated[dict[str, list[Norm]], msgspec.Meta(max_length=MAX_FORMATS)]


class LayerScores(Strict, frozen=True):
    """One number a layer for K and one for V, such as the gradient norms of W_k and of W_v."""

    k: list[Norm]
    v: list[Norm]


class Sensitivities(Strict, frozen=True):
    """Sensitivity in nats of K and of V to each format by name, one number a layer."""

    k: ByFormat
    v: ByFormat


class Spectra(Strict, frozen=True):
    """What spectral plans are made from: energies of runs of 16 channels in bases of K and of V, layer by layer.

    An energy is what the run costs, in nats, if only its means are kept.
    ``shrink``: of the metrics that the bases were solved with.
    """

    shrink: Annotated[float, msgspec.Meta(ge=0, le=1)]
    k: list[list[Norm]]
    v: list[list[Norm]]


class Prompts(Strict, frozen=True):
    """The profiled texts: source, number, tokens in all, and the limit on the tokens of one."""

    source: str
    count: Count
    tokens: Count
    max_tokens: Count


class Profile(Strict, frozen=True, kw_only=True):
    """A model's profile, the mean over texts: all that a plan is made from.

    ``dtype``: of the weights while they were profiled. ``context``: tokens that the model was made for.
    ``position_scale``: positions were multiplied by it.
    ``key_scale``: per layer, KV head and rotary pair the divisor of K that had been folded into the weights; None for
    weights as they came. ``scores``: gradient norms of W_k and W_v. ``key_outliers``: per layer the largest magnitude
    in K's largest channel over that in its median channel. ``has_qk_norm``: of the model. ``loss``: of a token at
    16 bits, in nats; None in files of releases that did not note it. ``spectra``, ``bases``: of spectral plans alone,
    the latter the SHA-256 of the file of bases beside the plan.
    """

    dtype: str
    context: Count
    position_scale: Annotated[int, msgspec.Meta(ge=1)]
    prompts: Prompts
    key_scale: KeyScale | None
    scores: LayerScores
    sensitivities: Sensitivities
    key_outliers: list[Norm]
    has_qk_norm: bool
    loss: Norm | None = None
    spectra: Spectra | msgspec.UnsetType = msgspec.UNSET
    bases: Digest | msgspec.UnsetType | None = msgspec.UNSET

    def lists(self) -> dict[str, Sequence[object]]:
        """Every list with one entry a layer, by field name."""
        found: dict[str, Sequence[object]] = {
            "scores.k": self.scores.k,
            "scores.v": self.scores.v,
            "key_outliers": self.key_outliers,
        }
        for side, formats in (("k", self.sensitivities.k), ("v", self.sensitivities.v)):
            found |= {f"sensitivities.{side}.{name}": values for name, values in formats.items()}
        if self.spectra:
            found |= {"spectra.k": self.spectra.k, "spectra.v": self.spectra.v}
        return found


def mean(values: Sequence[Sequence[float]]) -> list[float]:
    """The mean over texts of one number a layer, to six digits. Raises ``ModelError`` if any is not finite."""
    found = [float(f"{fmean(layer):.6g}") for layer in zip(*values, strict=True)]
    if not all(map(math.isfinite, found)):
        raise ModelError("its loss or its gradients are not finite", field="model", remedy="Check its weights")
    return found
