"""Plans: a ladder made for one model, with the profile and settings that led to it, as a plan file has them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Literal

from msgspec import UNSET
from msgspec.structs import replace

from qkv_engine.config import KVConfig
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.plan_file import VERSION, PlannedLadder, Strict, check_length, decode_plan

from .kvmix import KVmix
from .mixed import Mixed
from .pm_kvq import PMKVQ
from .profile import Profile
from .spectral import Spectral, num_runs

Settings = KVmix | PMKVQ | Mixed | Spectral


class KVPlan(Strict, frozen=True, kw_only=True):
    """The contents of a plan file: a model's profile, the settings that were solved for, and the ladder they led to."""

    version: Literal[2] = VERSION
    model: ModelFingerprint
    settings: Settings
    ladder: PlannedLadder
    profile: Profile

    @classmethod
    def make(cls, settings: Settings, profile: Profile, model: ModelFingerprint) -> KVPlan:
        """The plan that ``settings`` make of a profile. Raises ``CapacityError`` for a budget that no plan fits.

        Those of other methods than ``Spectral`` store K and V as the model has them, and leave the bases out.
        """
        if not isinstance(settings, Spectral):
            profile = replace(profile, spectra=UNSET, bases=UNSET)
        ladder = PlannedLadder.of(settings.solve(profile, model))
        return cls(model=model, settings=settings, ladder=ladder, profile=profile)

    def __post_init__(self) -> None:
        for field, values in self.profile.lists().items():
            check_length(f"profile.{field}", values, self.model.num_layers)
        for energies, layer in zip(self._energies(), chain(*[self.model.kv_of_layers] * 2), strict=False):
            check_length("profile.spectra", energies, num_runs(layer), "runs")
        self.config("plan")  # checks the ladder

    def _energies(self) -> list[list[float]]:
        spectra = self.profile.spectra
        return [*spectra.k, *spectra.v] if spectra else []

    @property
    def method(self) -> str:
        """The name of the method that made the ladder."""
        return str(type(self.settings).__struct_config__.tag)

    @property
    def context(self) -> int:
        """Tokens of a request of its budget; those that the model was made for where it has none."""
        return self.profile.context if isinstance(self.settings, KVmix) else self.settings.context

    def config(self, name: str) -> KVConfig:
        """The ladder, called ``name``, bound to the plan's model."""
        return self.ladder.config(name, self.model, self.profile.key_scale)


def read_plan(path: str | Path, field: str = "kv") -> KVPlan:
    """The plan in the file at ``path``, given as ``field``. Raises ``ConfigError`` for anything but a whole plan."""
    return decode_plan(path, KVPlan, field)
