"""Qwen3-Coder, Qwen3.5 and later: XML, in which strings stand as they are, and other arguments as JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import re

from .family import MarkedFamily
from .grammar import GrammarWriter
from .parser import CallSink
from .schemas import Tool, Tools
from .source import Delimiters, Reading, Source, Unreadable
from .written_values import KeySink, read_written, written

FUNCTION, PARAMETER = "<function=", "<parameter="
_ENDS = Delimiters("\n</parameter>", "</parameter>")
_NAME, _KEY = re.compile(r"[^<>\s]+"), re.compile(r"[^<>\n]+")


class QwenCoder(MarkedFamily):
    """Arguments in XML."""

    opening = "<tool_call>"
    marks = (opening, "</tool_call>")

    def is_of(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def read_call(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        yield from source.space()
        yield from source.expect(FUNCTION)
        name = yield from source.word(_NAME)
        yield from source.expect(">")
        keys = KeySink(sink, name)
        while True:
            yield from source.space()
            if (yield from source.takes(PARAMETER)):
                key = yield from source.word(_KEY)
                yield from source.expect(">")
                yield from source.takes("\n")
                yield from read_written(source, keys.key(key), _ENDS, tools.types(name, key))
            elif (yield from source.takes("</function>")):
                break
            else:
                raise Unreadable
        keys.end()
        yield from source.space()
        yield from source.takes("</tool_call>")

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        head, close = writer.literal(f"\n{FUNCTION}{tool.name}>\n"), writer.literal("</function>\n")
        arguments = written(writer, tool, lambda key: writer.literal(f"{PARAMETER}{key}>\n"), "\n</parameter>\n")
        return " ".join([head, *arguments, close, writer.mark("</tool_call>")])
