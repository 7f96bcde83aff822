"""Arguments that stand as plain text between marks: strings as they are, others as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .grammar import GrammarWriter, lengths
from .json_reading import quoted
from .parser import CallSink
from .schemas import Tool, as_json, closed, encode, resolved, types_of
from .source import Delimiters, Emit, Reading, Source, Unreadable

_TEXT = frozenset({"string"})


class KeySink:
    """Writes a call's arguments one by one. The call begins with the first of them, or at its end."""

    def __init__(self, sink: CallSink, name: str):
        self._sink, self._name, self._number = sink, name, 0

    def key(self, key: str) -> Emit:
        """Begins the argument ``key``; gives where its value goes, as JSON."""
        if not self._number:
            self._sink.begin(self._name)
        self._sink.arguments(f"{'{' if not self._number else ','}{encode(key)}:")
        self._number += 1
        return self._sink.arguments

    def end(self) -> None:
        """Ends the arguments."""
        if not self._number:
            self._sink.begin(self._name)
        self._sink.arguments("}" if self._number else "{}")


def read_written(source: Source, emit: Emit, ends: Delimiters, types: frozenset[str]) -> Reading[None]:
    """A value up to one of ``ends``: a string as it comes, another one when it is whole. Raises ``Unreadable``."""
    if types == _TEXT:
        emit('"')
        if (yield from source.until(ends, lambda text: emit(quoted(text)))) is None:
            raise Unreadable
        emit('"')
        return
    pieces: list[str] = []
    if (yield from source.until(ends, pieces.append)) is None:
        raise Unreadable
    emit(as_json("".join(pieces), types))


def written(writer: GrammarWriter, tool: Tool, head: Callable[[str], str], end: str) -> list[str]:
    """The expressions of a tool's arguments, in order: ``head`` of the name, the value, and the mark ``end``."""
    found = []
    for key, schema in tool.properties.items():
        argument = f"{head(key)} {_value(writer, tool, schema, end)}"
        found.append(argument if key in tool.required else f"({argument})?")
    return found


def _value(writer: GrammarWriter, tool: Tool, schema: Any, end: str) -> str:
    known = resolved(schema, tool.schema)
    types = types_of(known, tool.schema)
    choices = known.get("enum", [known["const"]] if "const" in known else None)
    if isinstance(choices, list) and choices:
        texts = (value if isinstance(value, str) else encode(value) for value in choices)
        return f"{writer.one_of(map(writer.literal, texts))} {writer.mark(end)}"
    if not types or "string" in types:
        return writer.text_until(end, *(lengths(known) if types == _TEXT else ()))
    if '"$ref"' in encode(known):
        known = {**{name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}, **known}
    return f"{writer.json(closed(known), is_strict=tool.is_strict)} {writer.mark(end)}"
