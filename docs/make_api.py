"""Fills the tables of ``docs/python_api.md`` from signatures and docstrings: ``python docs/make_api.py``.

Sections from ``<!-- NAME -->`` to ``<!-- end -->`` are made of ``qkv_engine.NAME``; the rest is written by hand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import qkv_engine

PAGE = Path(__file__).with_name("python_api.md")
SECTION = re.compile(r"(<!-- (\w+)( methods)? -->\n).*?(<!-- end -->)", re.DOTALL)


class Entry(NamedTuple):
    """One line ``names: meaning`` of a docstring, below its heading."""

    heading: str
    names: list[str]
    meaning: str


def fill(page: str) -> str:
    """``page`` with all sections made anew."""

    def section(found: re.Match[str]) -> str:
        kind = getattr(qkv_engine, found[2])
        return found[1] + "\n" + (methods(kind) if found[3] else tables(kind)) + "\n" + found[4]

    return SECTION.sub(section, page)


def entries(kind: type) -> Iterator[Entry]:
    """Documented options or fields of a class, in the order of its docstring."""
    heading, names, words = "", "", list[str]()
    for line in [*inspect.getdoc(kind).splitlines(), ""]:
        if line.startswith(" " * 8):
            words.append(line.strip())
            continue
        if names:
            yield Entry(heading, names.split(", "), " ".join(words))
            names, words = "", []
        if line.startswith(" " * 4):
            names, _, meaning = line.strip().partition(": ")
            words = [meaning]
        elif line:
            heading = line


def declarations(kind: type) -> dict[str, str]:
    """Type of each option or field, as written in the code, and its default where that is a plain value."""
    types = kind.__init__.__annotations__ if kind is qkv_engine.Engine else kind.__annotations__
    parameters = inspect.signature(kind).parameters.values()
    plain = {p.name: f" = {p.default!r}" for p in parameters if isinstance(p.default, str | int | float | None)}
    return {p.name: types[p.name] + plain.get(p.name, "") for p in parameters}


def tables(kind: type) -> str:
    """A table for each heading of the docstring of ``kind``."""
    declared, lines, last = declarations(kind), list[str](), ""
    for heading, names, meaning in entries(kind):
        if heading != last:
            lines += ["", f"| {heading} | type and default | meaning |", "|---|---|---|"]
            last = heading
        types = dict.fromkeys(f"`{declared[name]}`".replace("|", r"\|") for name in names)
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(types)} | {code(meaning)} |")
    return "\n".join(lines[1:]) + "\n"


def methods(kind: type) -> str:
    """Signature and docstring of each public method and property of ``kind``."""
    lines = []
    for name, member in vars(kind).items():
        if name.startswith("_") or not callable(getattr(member, "fget", member)):
            continue
        shown = name if isinstance(member, property) else f"{name}{call(member)}"
        lines += [f"**`{shown}`**", "", code(inspect.getdoc(member)), ""]
    return "\n".join(lines)


def call(method: object) -> str:
    """The parameters of a method with their defaults."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))


def code(text: str) -> str:
    """``text`` of a docstring in Markdown."""
    return text.replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
