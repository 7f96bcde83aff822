"""The ladders that the judge compares: presets and plans in the order of their bits, each beside its like."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qkv_engine.bench.quality import at_floor
from qkv_engine.cli.main import main as command
from qkv_engine.config import DENSE16, WEIGHTS, KVConfig, RungConfig
from qkv_engine.planner.plan import read_plan
from qkv_engine.presets import PRESETS

from .judge_texts import OTHER, OWN

CONTEXT = "16777216"  # tokens of a plan's budget: windows are nothing, so that budgets are bits of a block
WIDE_BUDGET = "8.5"  # of the plan that a profile comes with, which any model has
SINK, RECENT = 32, 128  # windows of the planner, Kitty and the presets with a sink


@dataclass(frozen=True)
class Contender:
    """A ladder on its floor, by the name of its row. ``method`` made a plan of the texts ``profile``.

    ``weights`` is the option of ``Engine``.
    """

    name: str
    kv: KVConfig
    method: str | None = None
    profile: str | None = None
    weights: str | None = None

    def windowed(self) -> Contender:
        """The same with the planner's windows, so that what is left of a difference is that of the formats."""
        name = f"{self.name}, windows {SINK} + {RECENT}"
        return replace(self, name=name, kv=replace(self.kv, name=name, sink=SINK, recent=RECENT, recent_ratio=0.0))


class Planner:
    """Makes plans with ``qkv-engine plan``, each once, as files in ``folder``; ``profiles`` are its words for texts."""

    def __init__(self, model: list[str], folder: Path, profiles: Mapping[str, list[str]]):
        self._model, self._folder, self._profiles = model, folder, profiles

    def plan(self, profile: str, method: str, budget: str = "") -> Contender | None:
        """The plan of ``method`` with ``budget`` bits a block, if it has one, from texts of ``profile``.

        None where the command refuses it, such as a budget that is too small for the model; it says why on stderr.
        """
        path = self._file(profile, method, budget)
        if path is None:
            return None
        name = " ".join(word for word in (method, budget) if word) + ("" if profile == OWN else f", {OTHER}")
        kv = at_floor(replace(read_plan(path).config("plan"), name=name))
        return Contender(name, kv, method, profile)

    def one_layers_keys(self) -> Contender | None:
        """Four bits for the keys of the layer that matter most by the profile, two for all else: a plan by hand.

        Layers with a window, whose blocks keep 8 bits, are not asked. None where all have one.
        """
        path = self._file(OWN, "mixed", "3.25")
        if path is None:
            return None
        plan = read_plan(path)
        keys = plan.profile.sensitivities.k["int2-channel-128"]
        narrow = [layer for layer, kv in enumerate(plan.model.kv_of_layers) if kv.window is None]
        most = max(narrow, key=lambda layer: keys[layer])
        k = tuple("int4-channel-128" if layer == most else "int2-channel-128" for layer in range(len(keys)))
        name = f"K of layer {most} at 4 bits, else 2"
        rungs = (DENSE16, RungConfig("by-hand", k, "int2-token-128"))
        return Contender(name, KVConfig(name=name, rungs=rungs, sink=SINK, recent=RECENT, eager=True), "by hand", OWN)

    def _file(self, profile: str, method: str, budget: str) -> Path | None:
        kind = "like" if profile == OWN else "unlike"
        path = self._folder / f"{kind}-{method}{f'-{budget}' if budget else ''}.json"
        if path.exists():
            return path
        # PM-KVQ's profile is of scaled keys; the other methods share one.
        first, made = ("scaled", "pm-kvq") if method == "pm-kvq" else ("plain", "mixed")
        source = self._folder / f"{kind}-profile-{first}.json"
        texts = [*self._model, *self._profiles[profile]]
        if not source.exists() and not _run(["plan", *texts, *_choice(made, WIDE_BUDGET), "-o", str(source)]):
            return None
        return path if _run(["plan", "--from", str(source), *_choice(method, budget), "-o", str(path)]) else None


def _choice(method: str, budget: str) -> list[str]:
    """The words of a command for a method, and for its budget if it takes one."""
    return ["--method", method, *(["--budget", f"{budget}bits", "--context", CONTEXT] if budget else [])]


def _run(words: list[str]) -> bool:
    """Runs a command, whose table goes to stderr; whether it did what it should."""
    with contextlib.redirect_stdout(sys.stderr):
        return command(words) == 0


def contenders(planner: Planner) -> Iterator[Contender]:
    """The rows of the judge, the reference first. Below a plan stands the same from unlike texts."""
    for one in _all(planner):
        if one is not None:
            yield one


def weights_contenders() -> Iterator[Contender]:
    """The rows of weights: as they are and in each format, beside KV at 16 bits; last, KV at 8 bits."""
    yield _preset("bf16")
    for name in WEIGHTS:
        yield Contender(f"weights {name}", PRESETS["bf16"], weights=name)
    yield _preset("int8")


def _all(planner: Planner) -> Iterator[Contender | None]:
    yield from map(_preset, ("bf16", "int4", "kivi-4"))
    kvmix = planner.plan(OWN, "kvmix")
    yield from (kvmix, planner.plan(OTHER, "kvmix"), kvmix and kvmix.windowed())
    yield from (*_both(planner, "pm-kvq", "3.25"), *_both(planner, "mixed", "3.25"))
    yield _preset("kitty-pro")
    pm_kvq = planner.plan(OWN, "pm-kvq", "2.55")
    yield from (pm_kvq, planner.plan(OTHER, "pm-kvq", "2.55"), pm_kvq and pm_kvq.windowed())
    yield from _both(planner, "mixed", "2.55")
    yield from (_preset("kitty"), planner.one_layers_keys(), _preset("patternkv-sink"))
    yield from _both(planner, "mixed", "2.3")
    yield from map(_preset, ("kivi-2", "kivi-2-sink"))
    yield from _both(planner, "pm-kvq", "2.3")
    yield from _both(planner, "mixed", "2.0")
    yield _preset("xquant")


def _preset(name: str) -> Contender:
    return Contender(name, at_floor(PRESETS[name]))


def _both(planner: Planner, method: str, budget: str) -> Iterator[Contender | None]:
    """A plan from texts like those that are judged, and from unlike ones."""
    yield from (planner.plan(profile, method, budget) for profile in (OWN, OTHER))
