"""Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Source: https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B, and the chat template of Qwen/Qwen3-8B.
"""

from __future__ import annotations

import re

from .family import MarkedFamily
from .grammar import GrammarWriter
from .json_reading import ignore, read_call
from .parser import CallSink
from .schemas import Tool, Tools, encode
from .source import Reading, Source

CLOSING = "</tool_call>"
_SURPLUS = re.compile(r"[\s}]+")  # brackets too many, which models write


class Hermes(MarkedFamily):
    """The form of most templates that mark calls."""

    opening = "<tool_call>"
    marks = (opening, CLOSING)

    def is_of(self, template: str) -> bool:
        return self.opening in template and CLOSING in template

    def read_call(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        yield from source.space()
        yield from read_call(source, sink)
        yield from source.run(_SURPLUS, ignore)
        yield from source.takes(CLOSING)

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        return f'"\\n" {json_call(writer, tool)} "\\n" {writer.mark(CLOSING)}'


def json_call(writer: GrammarWriter, tool: Tool, arguments: str = "arguments") -> str:
    """The expression of a call as a JSON object."""
    head = writer.literal(f'{{"name": {encode(tool.name)}, "{arguments}": ')
    return f'{head} {writer.arguments(tool)} "}}"'
