"""What tests of a GPU name exists: where there is none, nothing else would tell."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

FILES = sorted(path for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_modules_have_what_is_asked_of_them(path: Path):
    module, tree = importlib.import_module(f"{__package__}.{path.stem}"), ast.parse(path.read_text())
    modules = {name: value for name, value in vars(module).items() if isinstance(value, ModuleType)}
    for node in ast.walk(tree):  # short names within a function
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in modules:
            modules |= {target.id: modules[node.value.id] for target in node.targets if isinstance(target, ast.Name)}
    asked = {(node.value.id, node.attr) for node in ast.walk(tree) if is_attribute_of_a_name(node)}
    assert [pair for pair in asked if pair[0] in modules and not hasattr(modules[pair[0]], pair[1])] == []


def is_attribute_of_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
