"""KV presets, those of all format families by name, and ladders by what a user gives for ``kv``. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from qkv_engine.kernels.formats import FAMILIES

from .config import KVConfig
from .errors import ConfigError


def _steps_under_pressure(kv: KVConfig) -> bool:
    return len(kv.rungs) > 1 and not kv.eager


# In the order of tables: by family, and after them the ladders that keep 16 bits until memory runs short.
PRESETS: dict[str, KVConfig] = {
    kv.name: kv for kv in sorted((kv for family in FAMILIES for kv in family.presets), key=_steps_under_pressure)
}
DEFAULT_KV = "auto"
PLAN_SUFFIX = ".json"  # of a kv that names a plan file
PLANNED = ("kvmix", "pm-kvq", "mixed")  # methods that have a plan for each model in place of a preset


def main_presets() -> tuple[str, ...]:
    """The names of the presets without the variants of others in groups of 32 or with a sink."""
    return tuple(name for name in PRESETS if not name.endswith(("-g32", "-sink")))


def preset_families() -> Iterator[str]:
    """Names of the presets; presets that differ in groups and sink alone share one: "kivi-2[-g32][-sink]"."""
    for name in main_presets():
        yield name + "".join(f"[{end}]" for end in ("-g32", "-sink") if name + end in PRESETS)


def resolve_kv(kv: str | Path | KVConfig | None, state_dtype: str | None = None) -> KVConfig:
    """The KV configuration that ``kv`` stands for: None for the default one, a ``KVConfig`` for itself.

    Otherwise ``kv`` names a preset, or is a plan file's path: a ``Path``, or a string that ends in .json. A
    ``state_dtype`` takes the place of its own. Raises ``ConfigError`` for anything else.
    """
    found = _resolve(kv)
    return found if state_dtype is None else replace(found, state_dtype=state_dtype)


def _resolve(kv: str | Path | KVConfig | None) -> KVConfig:
    if kv is None:
        return PRESETS[DEFAULT_KV]
    if isinstance(kv, KVConfig):
        return kv
    if isinstance(kv, Path) or (isinstance(kv, str) and kv.endswith(PLAN_SUFFIX)):
        from .plan_file import load_plan  # takes msgspec, which --help does without

        return load_plan(kv)
    if isinstance(kv, str) and kv in PLANNED:
        remedy = f"Make one with qkv-engine plan MODEL --method {kv} -o plan.json and give its path"
        raise ConfigError("needs a plan for the model", field="kv", value=kv, remedy=remedy)
    if not isinstance(kv, str) or kv not in PRESETS:
        raise ConfigError("unknown KV preset", field="kv", value=kv, remedy=_kv_remedy(kv))
    return PRESETS[kv]


def _kv_remedy(kv: object) -> str:
    """What to give in place of ``kv``, which is no preset: the one it is like, or one of all."""
    if isinstance(kv, str) and (like := get_close_matches(kv[:40].lower(), [*PRESETS, *PLANNED], n=1)):
        return f"Did you mean {like[0]}?"
    others = "" if isinstance(kv, str) else ", a KVConfig"
    return f"Choose from {', '.join(main_presets())}{others}, or the path of a plan file (.json)"
