"""Llama 4, and Llama 3.2 with some templates: an answer that is a Python list of calls, ``[f(a=1, b='x'), g()]``.

Llama 4 may write it between ``<|python_start|>`` and ``<|python_end|>``. Source: Meta's model card of Llama 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import hexdigits

from .family import PlainAnswers
from .grammar import GrammarWriter
from .json_reading import MAX_DEPTH, quoted, read_scalar
from .parser import CallSink
from .schemas import Tool, Tools, encode
from .source import SPACE, Emit, Reading, Source, Unreadable
from .value_rules import Syntax, ValueRules
from .written_values import KeySink

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_WIDTHS = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"[A-Za-z]")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_STRINGS = (r'"([^"\\\n]|\\["\\nrt])' + '{low,high}"', r"'([^'\\\n]|\\['\\nrt])" + "{low,high}'")
SYNTAX = Syntax("True", "False", "None", _STRINGS, spellings=lambda text: (repr(text), encode(text)))


class Pythonic(PlainAnswers):
    """A list of calls that is an answer of its own; the names must be tools'."""

    marks = (START, END)

    def is_of(self, template: str) -> bool:
        return "[func_name1(" in template

    def read(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        blank: list[str] = []
        yield from source.run(SPACE, blank.append)
        sink.text("".join(blank))
        source.record()
        try:
            yield from source.takes(START)
            yield from source.space()
            yield from source.expect("[")
            char = ","
            while char == ",":
                yield from source.space()
                yield from _read_call(source, sink, tools)
                yield from source.space()
                char = yield from source.expect_one_of(",]")
            yield from source.space()
            yield from source.takes(END)
        except Unreadable:
            sink.text(source.recorded())
        yield from source.rest(sink.text)

    def forced(self, writer: GrammarWriter, tools: Sequence[Tool], most: int) -> str:
        return self._list(writer, tools, most)

    def mixed(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        calls = self._list(writer, tools, most)
        if writer.token(START) is None:
            return f"{calls} | {writer.text_not_after('[')}"
        return f"{writer.mark(START)}? {calls} {writer.mark(END)}? | {writer.text_not_after('[')}"

    def _list(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        calls = writer.one_of(self._call(writer, tool) for tool in tools)
        return f'"[" {writer.repeated(calls, writer.literal(", "), most)} "]"'

    def _call(self, writer: GrammarWriter, tool: Tool) -> str:
        rules = ValueRules(writer, tool.schema, SYNTAX)
        members = rules.members(tool.schema, lambda key: writer.literal(f"{key}="))
        return f'{writer.literal(f"{tool.name}(")} {members} ")"'


def _read_call(source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
    name = yield from source.word(_NAME)
    yield from source.space()
    yield from source.expect("(")
    if name not in tools:
        raise Unreadable
    keys = KeySink(sink, name)
    yield from source.space()
    while not (yield from source.takes(")")):
        key = yield from source.word(_NAME)
        yield from source.space()
        yield from source.expect("=")
        yield from source.space()
        yield from _read_value(source, keys.key(key), MAX_DEPTH)
        yield from _between(source, ")")
    keys.end()


def _between(source: Source, closing: str) -> Reading[None]:
    """Reads the comma behind an item; the bracket behind the last one stays."""
    yield from source.space()
    if (yield from source.peek()) != closing:
        yield from source.expect(",")
        yield from source.space()


def _read_value(source: Source, emit: Emit, depth: int) -> Reading[None]:
    """A literal of Python, as JSON. Raises ``Unreadable``."""
    char = yield from source.peek()
    if char and char in "'\"":
        yield from _read_string(source, emit)
    elif char and char in "[({":
        if depth == 0:
            raise Unreadable
        source.skip()
        yield from source.space()
        yield from _read_items(source, emit, {"[": "]", "(": ")", "{": "}"}[char], depth - 1)
    elif char.isalpha():
        word = yield from source.word(_WORD)
        if word not in _WORDS:
            raise Unreadable
        emit(_WORDS[word])
    else:
        emit((yield from read_scalar(source)))


def _read_items(source: Source, emit: Emit, closing: str, depth: int) -> Reading[None]:
    """The items of a list or tuple, or the pairs of a dict, and the bracket at their end."""
    is_dict, number = closing == "}", 0
    emit("{" if is_dict else "[")
    while not (yield from source.takes(closing)):
        emit("," if number else "")
        number += 1
        if is_dict:
            yield from _read_string(source, emit)
            yield from source.space()
            yield from source.expect(":")
            emit(":")
            yield from source.space()
        yield from _read_value(source, emit, depth)
        yield from _between(source, closing)
    emit("}" if is_dict else "]")


def _read_string(source: Source, emit: Emit) -> Reading[None]:
    quote = yield from source.expect_one_of("'\"")
    emit('"')
    while not (yield from source.takes(quote)):
        yield from source.run(_PLAIN[quote], lambda text: emit(quoted(text)))
        if (yield from source.takes("\\")):
            yield from _read_escape(source, emit)
        elif not (yield from source.peek()):
            raise Unreadable
    emit('"')


def _read_escape(source: Source, emit: Emit) -> Reading[None]:
    kind = yield from source.peek()
    if not kind:
        raise Unreadable
    source.skip()
    if kind not in _WIDTHS:
        emit(quoted(_ESCAPES.get(kind, kind if kind in "'\"\\" else f"\\{kind}")))
        return
    digits = ""
    for _ in range(_WIDTHS[kind]):
        digits += yield from source.expect_one_of(hexdigits)
    code = int(digits, 16)
    emit(quoted("\ufffd" if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)))
