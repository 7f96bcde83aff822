"""The code under test: the real modules, or copies loaded from their source text with a bug put in on purpose."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec, resolve_name
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .patch import Patch, apply

MODULES = {  # in order of their imports
    "hole": "qkv_engine.kv.hole",
    "places": "qkv_engine.kv.places",
    "arena": "qkv_engine.kv.arena",
    "bank": "qkv_engine.kv.bank",
    "spec": "qkv_engine.kv.spec",
    "block": "qkv_engine.kv.block",
    "store": "qkv_engine.kv.store",
    "group": "qkv_engine.kv.group",
    "reserve": "qkv_engine.kv.reserve",
    "table": "qkv_engine.kv.table",
    "shares": "qkv_engine.kv.shares",
    "hints": "qkv_engine.kv.hints",
    "idle": "qkv_engine.kv.idle",
    "borders": "qkv_engine.kv.borders",
    "checkpoints": "qkv_engine.kv.checkpoints",
    "hits": "qkv_engine.kv.hits",
    "host_piece": "qkv_engine.kv.host_piece",
    "host_tier": "qkv_engine.kv.host_tier",
    "shortage": "qkv_engine.kv.shortage",
    "fetching": "qkv_engine.kv.fetching",
    "disk": "qkv_engine.kv.disk",
    "disk_traffic": "qkv_engine.kv.disk_traffic",
    "host_traffic": "qkv_engine.kv.host_traffic",
    "prefix": "qkv_engine.kv.prefix",
    "demand": "qkv_engine.kv.demand",
    "manager": "qkv_engine.kv.manager",
    "resize": "qkv_engine.kv.resize",
    "queue": "qkv_engine.scheduler.queue",
    "output": "qkv_engine.scheduler.output",
    "coldest": "qkv_engine.scheduler.coldest",
    "pressure": "qkv_engine.scheduler.pressure",
    "turns": "qkv_engine.scheduler.turns",
    "scheduler": "qkv_engine.scheduler.scheduler",
    "submission": "qkv_engine.serving.submission",
    "registry": "qkv_engine.serving.registry",
    "recovery": "qkv_engine.serving.recovery",
    "resizer": "qkv_engine.serving.resizer",
    "core": "qkv_engine.serving.core",
}


@dataclass(frozen=True)
class Code:
    """The classes of one set of the modules."""

    Arena: Any
    BlockTables: Any
    PrefixCache: Any
    make_hints: Any
    HostTier: Any
    KVManager: Any
    Scheduler: Any
    EngineCore: Any
    Submission: Any
    pressure: ModuleType
    reserve: ModuleType
    spec: ModuleType
    resize: ModuleType


def source_path(file: str) -> Path:
    spec = find_spec(MODULES[file])
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).resolve()


_copies = count()
PLACE = "_sim_copy"  # for the package of a copy, in code that all of them share


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
        modules["prefix"].make_hints,
        modules["host_tier"].HostTier,
        modules["manager"].KVManager,
        modules["scheduler"].Scheduler,
        modules["core"].EngineCore,
        modules["submission"].Submission,
        modules["pressure"],
        modules["reserve"],
        modules["spec"],
        modules["resize"],
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


def parsed(name: str, patch: Patch | None = None) -> ast.Module:
    """The syntax tree of a module, with a bug put in. Raises ``ValueError`` unless there is one place for it."""
    tree = ast.parse(_source(name))
    if patch is not None:
        apply(patch, tree)
    return tree


def _compiled(name: str, patch: Patch | None, package: str) -> CodeType:
    code = _code(name) if patch is None else _compile(name, patch)
    return _in_package(code, {f"{PLACE}.{other}": f"{package}.{other}" for other in MODULES})


@cache
def _code(name: str) -> CodeType:
    """A module without a bug: compiled once, for the copies that differ in their package's name alone."""
    return _compile(name, None)


def _compile(name: str, patch: Patch | None) -> CodeType:
    """A module that imports the others from ``PLACE``."""
    path, tree = source_path(name), parsed(name, patch)
    home = MODULES[name].rpartition(".")[0]
    copies = {full: f"{PLACE}.{other}" for other, full in MODULES.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            full = resolve_name("." * node.level + (node.module or ""), home)
            node.module, node.level = copies.get(full, full), 0
    code: CodeType = compile(tree, str(path), "exec", dont_inherit=True)
    return code


def _in_package(code: CodeType, names: dict[str, str]) -> CodeType:
    """The same code, and that of its functions, with other modules imported."""
    consts = tuple(_in_package(const, names) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=consts)
