"""Imports point one way: each room of the house may import the rooms before it, and no circle of modules is left.

The name of a public class stands for one thing in all rooms.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
FOLDERS = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]

# Plain data comes first. A room is a package, or some modules of the package root.
ROOMS: tuple[str, ...] = (
    "errors sizes window layer_schedule input_files model_files closable own_thread request layer_kv fingerprint config"
    " validation metrics plan_file table_words",
    "sandbox",
    "text",
    "kernels.formats",
    "presets",
    "kernels",
    "sampling",
    "models",
    "kv",
    "kv_store",
    "scheduler",
    "device",
    "determinism",
    "loading",
    "parallel",
    "started",
    "serving",
    "sleeping disk_tier startup measured_loss fit intake progress_bar resizing request_stream engine",
    "planner",
    "bench",
    "serve",
    "cluster",
    "cli",
    "__main__",
)
WORKERS = {"sampling.grammar_worker", "text.template_worker"}  # the sandbox finds a program's ``Worker`` by that name
RANKS = {name: rank for rank, names in enumerate(ROOMS) for name in names.split()}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its name without the package's."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in sorted((HERE / folder).rglob("*.py")):
            parts = (*package.split(".")[1:], *path.relative_to(HERE / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that ``module`` imports, anywhere in it; not those for types alone."""
    path = modules()[module]
    parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in run_time_nodes(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            names = [*base, *(node.module or "").split(".")] if node.module else base
            if not node.level:
                if names[0] != "qkv_engine":
                    continue
                names = names[1:]
            for alias in node.names:
                inner = ".".join((*names, alias.name))
                found.add(inner if inner in modules() else ".".join(names))
    return frozenset(found - {module, ""})


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from run_time_nodes(node)


def rank(module: str) -> int:
    parts = module.split(".")
    return next(RANKS[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in RANKS)


@pytest.mark.parametrize("module", sorted(set(modules()) - {""}))
def test_imports_come_from_earlier_rooms(module: str):
    assert not [name for name in imports(module) if rank(name) > rank(module)]


def test_no_circle_of_modules():
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for name in imports(module):
                visit(name, (*way, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def test_no_two_public_classes_have_one_name():
    homes: dict[str, set[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {"Worker": WORKERS}
