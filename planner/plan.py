"""Plan files: a ladder made for one model, with the profile and settings that led to it, as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sized
from pathlib import Path
from typing import Final, Literal

import msgspec

from qkv_engine.config import MAX_NAME_CHARS, KVConfig, RungConfig
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.input_files import read_input
from qkv_engine.layer_schedule import LayerSchedule

from .kvmix import KVmix
from .mixed import Mixed
from .pm_kvq import PMKVQ
from .profile import KeyScale, Profile, Strict

VERSION: Final = 2  # of the file format; files of another version are refused
MAX_NBYTES = 4 * 2**20  # of a plan file: 16 rungs of 512 layers take a tenth of it
MAX_REASON_CHARS = 400  # of an error about a file, in which a name may have millions
_REMEDY = "Make it anew with qkv-engine plan"
_LEAF_LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")


Settings = KVmix | PMKVQ | Mixed


class PlannedRung(Strict, frozen=True):
    """``RungConfig`` in a file: the format of K and of V, one for all layers or a list of one each."""

    name: str
    k: str | list[str]
    v: str | list[str]

    @classmethod
    def of(cls, rung: RungConfig) -> PlannedRung:
        k, v = (_listed(side) for side in (rung.k, rung.v))
        return cls(name=rung.name, k=k, v=v)

    def config(self) -> RungConfig:
        k, v = (side if isinstance(side, str) else tuple(side) for side in (self.k, self.v))
        return RungConfig(self.name, k, v)


def _listed(side: str | tuple[str, ...] | LayerSchedule) -> str | list[str]:
    assert not isinstance(side, LayerSchedule), "a plan is made for one model"
    return side if isinstance(side, str) else list(side)


class PlannedLadder(Strict, frozen=True):
    """``KVConfig`` in a file, without name and model."""

    rungs: list[PlannedRung]
    sink: int
    recent: int
    recent_ratio: float
    eager: bool

    @classmethod
    def of(cls, kv: KVConfig) -> PlannedLadder:
        rungs = [PlannedRung.of(rung) for rung in kv.rungs]
        return cls(rungs, kv.sink, kv.recent, kv.recent_ratio, kv.eager)


class KVPlan(Strict, frozen=True, kw_only=True):
    """The contents of a plan file: a model's profile, the settings that were solved for, and the ladder they led to."""

    version: Literal[2] = VERSION
    model: ModelFingerprint
    settings: Settings
    ladder: PlannedLadder
    profile: Profile

    @classmethod
    def make(cls, settings: Settings, profile: Profile, model: ModelFingerprint) -> KVPlan:
        """The plan that ``settings`` make of a profile. Raises ``CapacityError`` for a budget that no plan fits."""
        ladder = PlannedLadder.of(settings.solve(profile, model))
        return cls(model=model, settings=settings, ladder=ladder, profile=profile)

    def __post_init__(self) -> None:
        layers = self.model.num_layers
        lists: dict[str, Sized] = {f"profile.{field}": values for field, values in self.profile.lists().items()}
        for rung in self.ladder.rungs:
            sides = {f"rung {rung.name}.k": rung.k, f"rung {rung.name}.v": rung.v}
            lists |= {field: side for field, side in sides.items() if not isinstance(side, str)}
        for field, values in lists.items():
            if len(values) != layers:
                raise ValueError(f"{field} has {len(values)} entries for {layers} layers")
        scale = self.profile.key_scale
        shape = (layers, self.model.num_kv_heads, self.model.head_dim // 2)
        if scale is not None and not _has_shape(scale, shape):
            raise ValueError(f"profile.key_scale is not of {shape[0]} layers, {shape[1]} heads and {shape[2]} pairs")
        self.config("plan")  # checks the rest

    @property
    def method(self) -> str:
        """The name of the method that made the ladder."""
        return str(type(self.settings).__struct_config__.tag)

    def config(self, name: str) -> KVConfig:
        """The ladder, called ``name``, bound to the plan's model."""
        return KVConfig(
            name=name,
            rungs=tuple(rung.config() for rung in self.ladder.rungs),
            sink=self.ladder.sink,
            recent=self.ladder.recent,
            recent_ratio=self.ladder.recent_ratio,
            eager=self.ladder.eager,
            model=self.model,
            key_scale=self.profile.key_scale,
        )


class _Versioned(msgspec.Struct):
    version: int


def read_plan(path: str | Path, field: str = "kv") -> KVPlan:
    """The plan in the file at ``path``, given as ``field``. Raises ``ConfigError`` for anything but a whole plan."""
    data = read_input(path, field=field, max_nbytes=MAX_NBYTES)
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise ValueError(f"version is {version}, this release reads {VERSION}")
        plan = msgspec.json.decode(data, type=KVPlan)
        json.loads(data, object_pairs_hook=_refuse_repeats)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = f"no plan: {str(error)[:MAX_REASON_CHARS]}"
        raise ConfigError(why, field=field, value=str(path), remedy=_REMEDY) from error
    return plan


def load_plan(path: str | Path) -> KVConfig:
    """The ladder of the plan file at ``path``, called by the file's name. Raises ``ConfigError`` as ``read_plan``."""
    plan, name = read_plan(path), Path(path).stem[:MAX_NAME_CHARS]
    if not name.isprintable():
        raise ConfigError("its name has to stand in tables", field="kv", value=str(path), remedy="Rename the file")
    return plan.config(name)


def plan_bytes(plan: KVPlan) -> bytes:
    """``plan`` as indented JSON, each list of numbers or names on one line."""
    text = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()
    return (_LEAF_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n").encode()


def _has_shape(scale: KeyScale, shape: tuple[int, int, int]) -> bool:
    layers, heads, pairs = shape
    return len(scale) == layers and all(len(of) == heads and all(len(row) == pairs for row in of) for of in scale)


def _refuse_repeats(pairs: list[tuple[str, object]]) -> None:
    """Raises ``ValueError`` if a JSON object has a key twice, of which readers take the last."""
    if len(dict(pairs)) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {twice!r} twice")
