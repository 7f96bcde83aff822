"""The code under test, loaded from its own source text: with any block size, and with a bug put in on purpose.

The books are written for blocks of 128 tokens. A simulation of blocks of 8 sees sixteen times as many block borders in
the same number of events, so each block size gets its own copy of the modules. Other modules are shared.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

OPEN_END_BLOCKS = 1  # blocks that admission expects of a request without max_tokens: few, so that requests exceed them

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
    """The classes of one copy of the modules."""

    block: int
    Arena: Any
    BlockTables: Any
    PrefixCache: Any
    KVManager: Any
    Scheduler: Any
    EngineCore: Any
    Submission: Any
    demand: ModuleType
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
def load(block: int, patch: Patch | None = None) -> Code:
    """A copy of the modules with blocks of ``block`` tokens and, if asked, a bug."""
    package = f"_sim_copy_{next(_copies)}"
    modules: dict[str, ModuleType] = {}
    for name in MODULES:
        module = modules[name] = ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(_compiled(name, patch if patch and patch.file == name else None, package), module.__dict__)
        if "BLOCK_TOKENS" in module.__dict__:
            module.__dict__["BLOCK_TOKENS"] = block
    modules["pressure"].__dict__["AHEAD_STEPS"] = max(1, block // 32)
    modules["demand"].__dict__["OPEN_END_TOKENS"] = OPEN_END_BLOCKS * block
    return Code(
        block,
        modules["arena"].Arena,
        modules["table"].BlockTables,
        modules["prefix"].PrefixCache,
        modules["manager"].KVManager,
        modules["scheduler"].Scheduler,
        modules["core"].EngineCore,
        modules["submission"].Submission,
        modules["demand"],
        modules["pressure"],
        modules["table"],
    )


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
