"""The store under test: the real modules, or copies of them with a bug put in on purpose."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec, resolve_name
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.sim.patch import Patch, apply

HOME = "qkv_engine.kv_store"
MODULES = (  # as they import each other
    *("record", "folder", "namespace", "segment", "index", "contents"),
    *("reader", "reads_first", "log", "writer", "store"),
)
_copies = count()


@dataclass(frozen=True)
class Code:
    """The modules of one set that tests use."""

    store: ModuleType
    folder: ModuleType
    namespace: ModuleType

    def copy_of(self, namespace: Any) -> Any:
        """A namespace of the real modules as one of these."""
        return self.namespace.Namespace.decode(namespace.encode())


@cache
def load(patch: Patch | None = None) -> Code:
    """The real modules; with a ``patch``, copies of them that have the bug."""
    modules = {name: import_module(f"{HOME}.{name}") for name in MODULES} if patch is None else _copy(patch)
    return Code(modules["store"], modules["folder"], modules["namespace"])


def parsed(name: str, patch: Patch | None = None) -> ast.Module:
    """The syntax tree of a module, with a bug put in. Raises ``ValueError`` unless there is one place for it."""
    spec = find_spec(f"{HOME}.{name}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    if patch is not None:
        apply(patch, tree)
    return tree


def _copy(patch: Patch) -> dict[str, ModuleType]:
    """Copies of all modules that import each other; other modules are shared."""
    package, modules = f"_store_copy_{next(_copies)}", dict[str, ModuleType]()
    copies = {f"{HOME}.{name}": f"{package}.{name}" for name in MODULES}
    for name in MODULES:
        tree = parsed(name, patch if patch.file == name else None)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                full = resolve_name("." * node.level + (node.module or ""), HOME)
                node.module, node.level = copies.get(full, full), 0
        module = modules[name] = ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(tree, f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    return modules
