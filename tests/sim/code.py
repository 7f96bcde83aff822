"""The code under test: the real modules, or copies loaded from their source text with a bug put in on purpose."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = {  # in order of their imports
    "arena": "qkv_engine.kv.arena",
    "bank": "qkv_engine.kv.bank",
    "block": "qkv_engine.kv.block",
    "table": "qkv_engine.kv.table",
    "prefix": "qkv_engine.kv.prefix",
    "shortage": "qkv_engine.kv.shortage",
    "demand": "qkv_engine.kv.demand",
    "manager": "qkv_engine.kv.manager",
    "queue": "qkv_engine.scheduler.queue",
    "output": "qkv_engine.scheduler.output",
    "coldest": "qkv_engine.scheduler.coldest",
    "pressure": "qkv_engine.scheduler.pressure",
    "scheduler": "qkv_engine.scheduler.scheduler",
    "submission": "qkv_engine.serving.submission",
    "registry": "qkv_engine.serving.registry",
    "recovery": "qkv_engine.serving.recovery",
    "core": "qkv_engine.serving.core",
}


@dataclass(frozen=True)
class Patch:
    """One bug: ``old`` is replaced by ``new`` in the source of module ``file``."""

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Code:
    """The classes of one set of the modules."""

    Arena: Any
    BlockTables: Any
    PrefixCache: Any
    KVManager: Any
    Scheduler: Any
    EngineCore: Any
    Submission: Any
    pressure: ModuleType
    table: ModuleType


def source_path(file: str) -> Path:
    spec = find_spec(MODULES[file])
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).resolve()


_copies = count()


@cache
def _source(file: str) -> str:
    """The text of a module, read once, so that all copies are of the same text."""
    return source_path(file).read_text("utf-8")


@cache
def load(patch: Patch | None = None) -> Code:
    """The real modules; with a ``patch``, copies of them that have the bug."""
    modules = {name: import_module(full) for name, full in MODULES.items()} if patch is None else _copy(patch)
    return Code(
        modules["arena"].Arena,
        modules["table"].BlockTables,
        modules["prefix"].PrefixCache,
        modules["manager"].KVManager,
        modules["scheduler"].Scheduler,
        modules["core"].EngineCore,
        modules["submission"].Submission,
        modules["pressure"],
        modules["table"],
    )


def _copy(patch: Patch) -> dict[str, ModuleType]:
    """Copies of all modules under test, that import each other; other modules are shared."""
    package = f"_sim_copy_{next(_copies)}"
    modules: dict[str, ModuleType] = {}
    for name in MODULES:
        module = modules[name] = ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(_compiled(name, patch if patch.file == name else None, package), module.__dict__)
    return modules


def _compiled(name: str, patch: Patch | None, package: str) -> Any:
    path, text = source_path(name), _source(name)
    if patch is not None:
        if text.count(patch.old) != 1:
            raise ValueError(f"mutant {patch.name!r}: its text occurs {text.count(patch.old)} times in {path.name}")
        text = text.replace(patch.old, patch.new)
    home = MODULES[name].rpartition(".")[0]
    parent = home.rpartition(".")[0]
    # Relative imports become absolute; imports of another module under test go to its copy.
    text = re.sub(r"^from \.\.([\w.]+) import", rf"from {parent}.\1 import", text, flags=re.M)
    text = re.sub(r"^from \.([\w.]+) import", rf"from {home}.\1 import", text, flags=re.M)
    for other, full in MODULES.items():
        text = text.replace(f"from {full} import", f"from {package}.{other} import")
    return compile(text, str(path), "exec", dont_inherit=True)
