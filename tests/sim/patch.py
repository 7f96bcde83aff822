"""Seeded bugs: a statement or an expression of one function is replaced, however its text is laid out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One bug: in ``function`` ("Class.method") of module ``file``, ``old`` is replaced by ``new``.

    Both are statements, none for "", or both are expressions. ``old`` occurs once in the function.
    """

    name: str
    file: str
    function: str
    old: str
    new: str


def apply(patch: Patch, tree: ast.Module) -> None:
    """Puts the bug into ``tree``. Raises ``ValueError`` unless its statement or expression is there, once."""
    function = _find(tree, patch.function)
    old, new = (ast.parse(text).body for text in (patch.old, patch.new))
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
        places = list(_expressions(function, old[0].value))
    else:
        places = list(_runs(function, old))
    if len(places) != 1:
        raise ValueError(f"mutant {patch.name!r}: {patch.old!r} occurs {len(places)} times in {patch.function}")
    owner, field, part = places[0]
    if isinstance(part, slice):
        statements = getattr(owner, field)
        statements[part] = new
        if not statements:
            statements.append(ast.Pass())
    else:
        assert isinstance(new[0], ast.Expr)
        if part is None:
            setattr(owner, field, new[0].value)
        else:
            getattr(owner, field)[part] = new[0].value
    ast.fix_missing_locations(tree)


def _find(tree: ast.Module, function: str) -> ast.AST:
    """The function or class of that dotted name; the module for ""."""
    found: ast.AST = tree
    for name in filter(None, function.split(".")):
        found = next(
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        )
    return found


Place = tuple[ast.AST, str, slice | int | None]


def _expressions(function: ast.AST, wanted: ast.expr) -> Iterator[Place]:
    """Where ``wanted`` stands: the node that holds it, the field, and the place in the field if that is a list."""
    text = ast.dump(wanted)
    for node in ast.walk(function):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and ast.dump(value) == text:
                yield node, field, None
            elif isinstance(value, list):
                yield from (
                    (node, field, i) for i, x in enumerate(value) if isinstance(x, ast.expr) and ast.dump(x) == text
                )


def _runs(function: ast.AST, wanted: list[ast.stmt]) -> Iterator[Place]:
    """Where the statements ``wanted`` follow one another: the node that holds them, the field, and their places."""
    texts = [ast.dump(node) for node in wanted]
    for node in ast.walk(function):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                found = [ast.dump(each) for each in value]
                for i in range(len(found) - len(texts) + 1):
                    if found[i : i + len(texts)] == texts:
                        yield node, field, slice(i, i + len(texts))
