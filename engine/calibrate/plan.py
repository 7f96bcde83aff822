"""Plan files: a ladder made for one model, with the scores and settings that led to it, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sized
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from ..config import MAX_NAME_CHARS, KVConfig, RungConfig
from ..errors import ConfigError
from ..fingerprint import ModelFingerprint
from ..input_files import read_input
from ..layer_schedule import LayerSchedule
from .kvmix import KVmix, LayerScores

VERSION: Final = 1  # of the file's form; any other is refused
MAX_NBYTES = 4 * 2**20  # of a plan file: 16 rungs of 512 layers take a tenth of it
MAX_REASON_CHARS = 400  # of an error about a file: a name in it may have millions
_REMEDY = "Make it anew with qkv-engine plan"
_LEAF_LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class PlannedRung(_Strict, frozen=True):
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


class PlannedLadder(_Strict, frozen=True):
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


class Prompts(_Strict, frozen=True):
    """Texts that were profiled: their source, their number, their tokens in all, and the most of any that counted."""

    source: str
    count: Count
    tokens: Count
    max_tokens: Count


class KVPlan(_Strict, frozen=True, kw_only=True):
    """The contents of a plan file."""

    version: Literal[1] = VERSION
    method: Literal["kvmix"]
    model: ModelFingerprint
    settings: KVmix
    prompts: Prompts
    scores: LayerScores
    ladder: PlannedLadder

    def __post_init__(self) -> None:
        layers = self.model.num_layers
        lists: dict[str, Sized] = {"scores.k": self.scores.k, "scores.v": self.scores.v}
        for rung in self.ladder.rungs:
            sides = {f"rung {rung.name}.k": rung.k, f"rung {rung.name}.v": rung.v}
            lists |= {field: side for field, side in sides.items() if not isinstance(side, str)}
        for field, values in lists.items():
            if len(values) != layers:
                raise ValueError(f"{field} has {len(values)} entries for {layers} layers")
        self.config("plan")  # which checks the rest

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
        )


class _Versioned(msgspec.Struct):
    version: int


def read_plan(path: str | Path) -> KVPlan:
    """The plan in the file at ``path``. Raises ``ConfigError``, saying where, for anything but a whole plan."""
    data = read_input(path, field="kv", max_nbytes=MAX_NBYTES)
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise ValueError(f"version is {version}, this release reads {VERSION}")
        plan = msgspec.json.decode(data, type=KVPlan)
        json.loads(data, object_pairs_hook=_refuse_repeats)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refusal(path, f"no plan: {str(error)[:MAX_REASON_CHARS]}") from error
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


def _refuse_repeats(pairs: list[tuple[str, object]]) -> None:
    """Raises ``ValueError`` if a JSON object has a key twice, of which readers take the last."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"an object has the key {twice!r} twice")


def _refusal(path: str | Path, why: str) -> ConfigError:
    return ConfigError(why, field="kv", value=str(path), remedy=_REMEDY)
