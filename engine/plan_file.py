"""Plan files as the engine reads them: a ladder made for one model, as JSON. No torch here.

Settings and profile, from which the ladder was made, are the planner's: ``planner/plan.py`` reads them too.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from .config import MAX_NAME_CHARS, BasesFile, KVConfig, RungConfig
from .errors import ConfigError
from .fingerprint import ModelFingerprint
from .input_files import read_input
from .layer_schedule import LayerSchedule

VERSION: Final = 2  # of the file format; files of another version are refused
MAX_NBYTES = 4 * 2**20  # of a plan file: 16 rungs of 512 layers take a tenth of it
MAX_REASON_CHARS = 400  # of an error about a file, in which a name may have millions
LEAST_SCALE, MOST_SCALE = 1e-4, 1e4  # bounds of a divisor of K; a channel that is always 0 gets the lower one
BASES_SUFFIX = ".bases.safetensors"  # of the file of bases beside a plan, in place of the plan's own
_REMEDY = "Make it anew with qkv-engine plan"
_LEAF_LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")

Divisor = Annotated[float, msgspec.Meta(ge=LEAST_SCALE, le=MOST_SCALE)]
KeyScale = tuple[tuple[tuple[Divisor, ...], ...], ...]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256 in hex


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a plan file, which is refused if it has unknown fields."""


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


def check_length(field: str, values: Sequence[object], number: int, of: str = "layers") -> None:
    """Raises ``ValueError`` unless ``values``, those of ``field`` in a plan file, are ``number``, one each ``of``."""
    if len(values) != number:
        raise ValueError(f"{field} has {len(values)} entries for {number} {of}")


class PlannedLadder(Strict, frozen=True):
    """``KVConfig`` in a file, without name, model and divisors of K."""

    rungs: list[PlannedRung]
    sink: int
    recent: int
    recent_ratio: float
    eager: bool

    @classmethod
    def of(cls, kv: KVConfig) -> PlannedLadder:
        rungs = [PlannedRung.of(rung) for rung in kv.rungs]
        return cls(rungs, kv.sink, kv.recent, kv.recent_ratio, kv.eager)

    def config(self, name: str, model: ModelFingerprint, key_scale: KeyScale | None) -> KVConfig:
        """The ladder, called ``name``, bound to ``model``. Raises ``ValueError`` unless it is one of that shape."""
        for rung in self.rungs:
            for side, formats in (("k", rung.k), ("v", rung.v)):
                if not isinstance(formats, str):
                    check_length(f"rung {rung.name}.{side}", formats, model.num_layers)
        shape = (model.num_layers, model.num_kv_heads, model.head_dim // 2)
        if key_scale is not None and not _has_shape(key_scale, shape):
            raise ValueError(f"profile.key_scale is not of {shape[0]} layers, {shape[1]} heads and {shape[2]} pairs")
        return KVConfig(
            name=name,
            rungs=tuple(rung.config() for rung in self.rungs),
            sink=self.sink,
            recent=self.recent,
            recent_ratio=self.recent_ratio,
            eager=self.eager,
            model=model,
            key_scale=key_scale,
        )


def _has_shape(scale: KeyScale, shape: tuple[int, int, int]) -> bool:
    layers, heads, pairs = shape
    return len(scale) == layers and all(len(of) == heads and all(len(row) == pairs for row in of) for of in scale)


class _ProfiledKeys(msgspec.Struct, frozen=True):
    """The part of a profile that weights are loaded with; the rest is the planner's."""

    key_scale: KeyScale | None
    bases: Digest | None = None


class _PlanFile(Strict, frozen=True):
    """The contents of a plan file, ``settings`` and most of ``profile`` unchecked."""

    version: Literal[2]
    model: ModelFingerprint
    settings: object
    ladder: PlannedLadder
    profile: _ProfiledKeys

    def __post_init__(self) -> None:
        self.config("plan")  # checks the ladder

    def config(self, name: str) -> KVConfig:
        return self.ladder.config(name, self.model, self.profile.key_scale)


class _Versioned(msgspec.Struct):
    version: int


PlanT = TypeVar("PlanT", bound=msgspec.Struct)


def decode_plan(path: str | Path, contents: type[PlanT], field: str = "kv") -> PlanT:
    """The plan file at ``path``, given as ``field``, as ``contents``. Raises ``ConfigError`` for anything else."""
    data = read_input(path, field=field, max_nbytes=MAX_NBYTES)
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise ValueError(f"version is {version}, this release reads {VERSION}")
        plan = msgspec.json.decode(data, type=contents)
        json.loads(data, object_pairs_hook=_refuse_repeats)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = f"no plan: {str(error)[:MAX_REASON_CHARS]}"
        raise ConfigError(why, field=field, value=str(path), remedy=_REMEDY) from error
    return plan


def load_plan(path: str | Path) -> KVConfig:
    """The ladder of the plan file at ``path``, called by the file's name. Raises ``ConfigError`` for any other file."""
    plan, name = decode_plan(path, _PlanFile), Path(path).stem[:MAX_NAME_CHARS]
    if not name.isprintable():
        raise ConfigError("its name has to stand in tables", field="kv", value=str(path), remedy="Rename the file")
    config, digest = plan.config(name), plan.profile.bases
    return config if digest is None else replace(config, bases=BasesFile(str(bases_path(path)), digest))


def bases_path(plan: str | Path) -> Path:
    """The file of bases that belongs to the plan file at ``plan``: beside it, as an absolute path."""
    return Path(os.path.abspath(os.path.expanduser(plan))).with_suffix(BASES_SUFFIX)


def plan_bytes(plan: msgspec.Struct) -> bytes:
    """``plan`` as indented JSON, each list of numbers or names on one line."""
    text = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()
    return (_LEAF_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n").encode()


def _refuse_repeats(pairs: list[tuple[str, object]]) -> None:
    """Raises ``ValueError`` if a JSON object has a key twice, of which readers take the last."""
    if len(dict(pairs)) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {twice!r} twice")
