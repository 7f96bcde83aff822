"""GLM-4.5 and later: names and values of arguments in turns, strings as they are, and other values as JSON.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM-4.7 leaves out the line ends. Source: the chat templates of zai-org/GLM-4.5 and zai-org/GLM-4.7.
"""

from __future__ import annotations

import re

from .family import MarkedFamily
from .grammar import GrammarWriter
from .parser import CallSink
from .schemas import Tool, Tools
from .source import Delimiters, Reading, Source
from .written_values import KeySink, read_written, written

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
CLOSING = "</tool_call>"
_ENDS = Delimiters(VALUE_END)
_NAME, _KEY = re.compile(r"[^<>{\s]+"), re.compile(r"[^<>\n]+")


class Glm(MarkedFamily):
    """Keys and values in turns."""

    opening = "<tool_call>"
    marks = (opening, CLOSING, KEY, KEY_END, VALUE, VALUE_END)

    def is_of(self, template: str) -> bool:
        return KEY in template and VALUE in template

    def read_call(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        yield from source.space()
        name = yield from source.word(_NAME)
        keys = KeySink(sink, name)
        yield from source.space()
        while (yield from source.takes(KEY)):
            key = yield from source.word(_KEY)
            yield from source.expect(KEY_END)
            yield from source.space()
            yield from source.expect(VALUE)
            yield from read_written(source, keys.key(key), _ENDS, tools.types(name, key))
            yield from source.space()
        yield from source.expect(CLOSING)
        keys.end()

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        def head(key: str) -> str:
            marks = writer.mark(KEY), writer.literal(key), writer.mark(KEY_END), line, writer.mark(VALUE)
            return f"{line} {' '.join(marks)}"

        line = writer.rule("r", r'"\n"?')
        return " ".join(
            [writer.literal(tool.name), *written(writer, tool, head, VALUE_END), line, writer.mark(CLOSING)]
        )
