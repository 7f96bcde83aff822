"""The tools of a request: names, and what their schemas say of arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

JsonObject = dict[str, Any]
MAX_REFERENCES = 32  # in a row
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python writes them
# Keys of a schema that say nothing of the form of a value.
_REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
_CONSTANTS = frozenset({"enum", "const", "required"})
# Keys beside which an object is not closed: they speak of other members.
_OPENING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


class Tool(NamedTuple):
    """A function that the client runs. ``schema`` is that of its arguments."""

    name: str
    schema: JsonObject
    is_strict: bool = False

    @property
    def properties(self) -> JsonObject:
        """The schemas of its arguments by name."""
        found = resolved(self.schema, self.schema).get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> frozenset[str]:
        """The arguments that a call must have."""
        found = resolved(self.schema, self.schema).get("required")
        return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()

    def types(self, argument: str) -> frozenset[str]:
        """JSON's types that an argument may have; none where nothing is known of it."""
        return types_of(self.properties.get(argument), self.schema)


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: Iterable[Tool]):
        self.by_name = {tool.name: tool for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def types(self, name: str, argument: str) -> frozenset[str]:
        """JSON's types that an argument of a tool may have; none where nothing is known of it."""
        tool = self.by_name.get(name)
        return frozenset() if tool is None else tool.types(argument)


def read_tools(given: Sequence[Any]) -> list[Tool]:
    """The tools of a body, in the form of chat completions; what has another form is the template's alone."""
    found = [tool.get("function") for tool in given if isinstance(tool, dict)]
    return [_tool(function) for function in found if isinstance(function, dict) and _has_name(function)]


def resolved(schema: Any, root: JsonObject) -> JsonObject:
    """``schema``, or what its ``$ref`` within ``root`` leads to; {} for what is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(root, reference)
    return {}


def types_of(schema: Any, root: JsonObject) -> frozenset[str]:
    """JSON's types that ``schema`` allows; none where it does not say."""
    found, left, seen = set[str](), [schema], set[int]()
    while left:
        known = resolved(left.pop(), root)
        if id(known) in seen:
            continue
        seen.add(id(known))
        choices, types = known.get("anyOf", known.get("oneOf")), _own_types(known)
        if types:
            found |= types
        elif isinstance(choices, list) and choices:
            left += choices
        else:
            return frozenset()
    return frozenset(found)


def _own_types(schema: JsonObject) -> frozenset[str]:
    """The types that ``schema`` names itself, or by its values."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = schema.get("enum") if "enum" in schema else [schema["const"]] if "const" in schema else None
    return frozenset(_TYPES.get(type(value), "null") for value in values) if isinstance(values, list) else frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """An argument that was written as plain text, as JSON of its ``types``; a string where it is none of them."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return encode(text)
    kind = _TYPES.get(type(value), "null")
    fits = kind in types or (kind == "integer" and "number" in types) or (not types and kind != "string")
    return bare if fits and kind != "string" else encode(text)


def encode(value: Any) -> str:
    """A value as JSON."""
    return msgspec.json.encode(value).decode()


def without_remarks(schema: Any) -> Any:
    """``schema`` without what is said to people alone, such as descriptions."""
    if isinstance(schema, list):
        return [without_remarks(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _kept(key, value) for key, value in schema.items() if key not in _REMARKS}


def closed(schema: Any) -> Any:
    """``schema`` whose objects have no other members than those that it names: a model could go on for ever."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _CONSTANTS else closed(value) for key, value in schema.items() if key != "allOf"}
    if "properties" in schema and not _OPENING & schema.keys():
        found["additionalProperties"] = False
    return found | ({"allOf": schema["allOf"]} if "allOf" in schema else {})


def _kept(key: str, value: Any) -> Any:
    if key in _CONSTANTS:
        return value
    if key in _MAPS and isinstance(value, dict):  # whose keys are names
        return {name: without_remarks(each) for name, each in value.items()}
    return without_remarks(value)


def _has_name(function: JsonObject) -> bool:
    name = function.get("name")
    return isinstance(name, str) and bool(name)


def _tool(function: JsonObject) -> Tool:
    schema = function.get("parameters")
    known = schema if isinstance(schema, dict) and schema else {"properties": {}}
    return Tool(function["name"], {"type": "object", **known}, function.get("strict") is True)


def _at(root: JsonObject, reference: str) -> Any:
    """What a reference such as ``#/$defs/City`` leads to; None where there is nothing."""
    found: Any = root
    for part in _parts(reference):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _parts(reference: str) -> Iterator[str]:
    path = reference.removeprefix("#").strip("/")
    return (part.replace("~1", "/").replace("~0", "~") for part in path.split("/") if part)
