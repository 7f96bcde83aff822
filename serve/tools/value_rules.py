"""Grammars of values that a schema describes, for families whose values are no JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .grammar import GrammarWriter, lengths
from .schemas import JsonObject, encode, resolved, types_of

MAX_DEPTH = 16  # of schemas within one another; deeper values are any
_NUMBERS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Syntax(NamedTuple):
    """How values are written.

    Fields
        true, false, null: the words for them.
        strings: regular expressions of a string of "low" to "high" characters; none where ``quote`` is one.
        quote: the mark on both sides of a string, in which all characters stand for themselves.
        spellings: the ways to write a string without such marks.
    """

    true: str
    false: str
    null: str
    strings: tuple[str, ...] = ()
    quote: str = ""
    separator: str = ", "
    colon: str = ": "
    spellings: Callable[[str], Iterable[str]] = lambda text: ()


class ValueRules:
    """Expressions of values under the schemas within ``root``."""

    def __init__(self, writer: GrammarWriter, root: JsonObject, syntax: Syntax):
        self._writer, self._root, self._syntax = writer, root, syntax

    def members(self, schema: JsonObject, key: Callable[[str], str], depth: int = MAX_DEPTH) -> str:
        """The arguments or members that ``schema`` names, in order; ``key`` writes what stands before a value."""
        known = resolved(schema, self._root)
        properties, required = known.get("properties"), known.get("required")
        needed = required if isinstance(required, list) else []
        given = properties.items() if isinstance(properties, dict) else ()
        items = [(f"{key(name)} {self.value(each, depth - 1)}", name in needed) for name, each in given]
        return self._sequence(items)

    def value(self, schema: Any, depth: int = MAX_DEPTH) -> str:
        """A value of ``schema``."""
        if isinstance(schema, dict) and "$ref" in schema:
            known = resolved(schema, self._root)
            return self._writer.recursive(
                encode([schema["$ref"], id(self._root)]), lambda: self.value(known, depth - 1)
            )
        known = resolved(schema, self._root)
        choices = known.get("enum", [known["const"]] if "const" in known else known.get("anyOf", known.get("oneOf")))
        types = types_of(known, self._root)
        if isinstance(choices, list) and choices and depth > 0:
            is_enum = "enum" in known or "const" in known
            return self._writer.one_of(map(self.constant, choices) if is_enum else self._each(choices, depth))
        if not types or depth <= 0:
            return self._any()
        return self._writer.one_of(self._of_type(kind, known, depth) for kind in sorted(types))

    def constant(self, value: Any) -> str:
        """Exactly ``value``."""
        syntax, literal = self._syntax, self._writer.literal
        if isinstance(value, str):
            if syntax.quote:
                mark = self._writer.mark(syntax.quote)
                return f"{mark} {literal(value)} {mark}" if value else f"{mark} {mark}"
            return self._writer.one_of(map(literal, syntax.spellings(value)))
        if value is None or isinstance(value, bool):
            return literal({True: syntax.true, False: syntax.false, None: syntax.null}[value])
        return literal(encode(value))

    def _each(self, schemas: Iterable[Any], depth: int) -> Iterable[str]:
        return (self.value(schema, depth - 1) for schema in schemas)

    def _of_type(self, kind: str, schema: JsonObject, depth: int) -> str:
        if kind == "string":
            return self._string(*lengths(schema))
        if kind in ("integer", "number"):
            bounds = {name: schema[name] for name in _NUMBERS if name in schema} | {"type": kind}
            return self._writer.json(bounds, is_strict=False)
        if kind == "boolean":
            return self._writer.one_of((self.constant(True), self.constant(False)))
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return f'"{{" {self.members(schema, self._key, depth)} "}}"'
        return self._any_object() if kind == "object" else self.constant(None)

    def _array(self, schema: JsonObject, depth: int) -> str:
        item = self.value(schema.get("items"), depth - 1)
        low, high = schema.get("minItems"), schema.get("maxItems")
        least, most = (low if isinstance(low, int) else 0), (high if isinstance(high, int) else None)
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._separator} {item}){more}"
        return self._writer.rule("v", f'"[" {items if least else f"({items})?"} "]"')

    def _string(self, low: int, high: int | None) -> str:
        writer, quote, most = self._writer, self._syntax.quote, "" if high is None else str(high)
        if quote:
            return f"{writer.mark(quote)} {writer.text_until(quote, low, high)}"
        counted = [pattern.replace("low,high", f"{low},{most}") for pattern in self._syntax.strings]
        return writer.one_of(map(writer.regex, counted))

    def _key(self, name: str) -> str:
        key = self._writer.literal(name) if self._syntax.quote else self.constant(name)
        return f"{key} {self._writer.literal(self._syntax.colon)}"

    def _any(self) -> str:
        """Any value: a rule that refers to itself."""
        return self._writer.recursive("any", self._any_choices)

    def _any_choices(self) -> str:
        item, numbers = self._any(), self._writer.json({"type": "number"}, is_strict=False)
        words = map(self.constant, (True, False, None))
        array = f'"[" ({item} ({self._separator} {item})*)? "]"'
        return " | ".join([self._string(0, None), numbers, *words, array, self._any_object()])

    def _any_object(self) -> str:
        key = self._writer.regex("[A-Za-z_][A-Za-z0-9_]*") if self._syntax.quote else self._string(0, None)
        member = f"{key} {self._writer.literal(self._syntax.colon)} {self._any()}"
        return self._writer.rule("v", f'"{{" ({member} ({self._separator} {member})*)? "}}"')

    @property
    def _separator(self) -> str:
        return self._writer.literal(self._syntax.separator)

    def _sequence(self, items: list[tuple[str, bool]]) -> str:
        """Items with separators between those that are there; only the needed ones must be."""
        after = {True: '""', False: '""'}  # the rest, by whether it begins the sequence
        for item, is_needed in reversed(items):
            after = {is_first: self._step(item, is_needed, is_first, after) for is_first in (True, False)}
        return after[True]

    def _step(self, item: str, is_needed: bool, is_first: bool, after: dict[bool, str]) -> str:
        here = f"{item if is_first else f'{self._separator} {item}'} {after[False]}"
        return self._writer.rule("s", here if is_needed else f"{here} | {after[is_first]}")
