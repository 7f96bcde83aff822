"""Gemma 4 and FunctionGemma: ``call:NAME{KEY:VALUE,...}`` between marks, and strings between marks of their own.

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>
    <start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>

Source: the chat templates of google/gemma-4-E4B-it and google/functiongemma-270m-it.
"""

from __future__ import annotations

import re

from .family import MarkedFamily
from .grammar import GrammarWriter
from .json_reading import MAX_DEPTH, quoted, read_scalar, read_string
from .parser import CallSink
from .schemas import Tool, Tools, encode
from .source import Delimiters, Emit, Reading, Source, Unreadable
from .value_rules import Syntax, ValueRules
from .written_values import KeySink

_NAME = re.compile(r"[^{}\s:]+")
_KEY = re.compile(r"[^{}\[\]:,\s<]+")


class Gemma(MarkedFamily):
    """One of the two sets of marks."""

    def __init__(self, opening: str, closing: str, quote: str):
        self.opening, self._closing, self._quote = opening, closing, quote
        self.marks = (opening, closing, quote)
        self._quotes = Delimiters(quote)
        self._syntax = Syntax("true", "false", "null", quote=quote, separator=",", colon=":")

    def is_of(self, template: str) -> bool:
        return f"{self.opening}call:" in template

    def read_call(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        yield from source.space()
        yield from source.expect("call:")
        name = yield from source.word(_NAME)
        yield from source.expect("{")
        keys = KeySink(sink, name)
        yield from source.space()
        while not (yield from source.takes("}")):
            key = yield from self._read_key(source)
            yield from self._read_value(source, keys.key(key), MAX_DEPTH)
            yield from _between(source, "}")
        keys.end()
        yield from source.space()
        yield from source.takes(self._closing)

    def _read_key(self, source: Source) -> Reading[str]:
        """A name with or without marks, and the colon behind it."""
        key: list[str] = []
        if not (yield from source.takes(self._quote)):
            key.append((yield from source.word(_KEY)))
        elif (yield from source.until(self._quotes, key.append)) is None:
            raise Unreadable
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        return "".join(key)

    def _read_value(self, source: Source, emit: Emit, depth: int) -> Reading[None]:
        char = yield from source.peek()
        if (yield from source.takes(self._quote)):
            emit('"')
            if (yield from source.until(self._quotes, lambda text: emit(quoted(text)))) is None:
                raise Unreadable
            emit('"')
        elif char == '"':
            yield from read_string(source, emit)
        elif char and char in "[{":
            if depth == 0:
                raise Unreadable
            source.skip()
            yield from source.space()
            yield from self._read_items(source, emit, "]" if char == "[" else "}", depth - 1)
        else:
            emit((yield from read_scalar(source)))

    def _read_items(self, source: Source, emit: Emit, closing: str, depth: int) -> Reading[None]:
        number = 0
        emit("{" if closing == "}" else "[")
        while not (yield from source.takes(closing)):
            emit("," if number else "")
            number += 1
            if closing == "}":
                emit(f"{encode((yield from self._read_key(source)))}:")
            yield from self._read_value(source, emit, depth)
            yield from _between(source, closing)
        emit(closing)

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        rules = ValueRules(writer, tool.schema, self._syntax)
        members = rules.members(tool.schema, lambda key: writer.literal(f"{key}:"))
        return f'{writer.literal(f"call:{tool.name}{{")} {members} "}}" {writer.mark(self._closing)}'


def _between(source: Source, closing: str) -> Reading[None]:
    """Reads the comma behind an item; the bracket behind the last one stays."""
    yield from source.space()
    if (yield from source.peek()) != closing:
        yield from source.expect(",")
        yield from source.space()
