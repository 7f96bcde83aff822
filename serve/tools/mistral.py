"""Mistral: ``[TOOL_CALLS]NAME[ARGS]{...}`` for each call, and before version 11 of its tokenizer a list of objects.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]

Some write ``[CALL_ID]`` and an id behind the name. Source: mistral-common, and the chat templates of its models.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from .family import MarkedFamily
from .grammar import GrammarWriter
from .hermes import json_call
from .json_reading import read_call, read_object
from .parser import CallSink
from .schemas import Tool, Tools
from .source import Reading, Source

OPENING, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARS = 9  # letters and digits: templates refuse other ids
_NAME = re.compile(r"[^\[\]{}\s]+")


class Mistral(MarkedFamily):
    """A mark, a name and JSON for each call; reads the older form, too."""

    opening = OPENING
    marks: tuple[str, ...] = (OPENING, ARGS, CALL_ID)

    def is_of(self, template: str) -> bool:
        return OPENING in template and ARGS in template

    def new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARS))

    def read_call(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        yield from source.space()
        if (yield from source.takes("[")):
            char = ","
            while char == ",":
                yield from source.space()
                yield from read_call(source, sink)
                yield from source.space()
                char = yield from source.expect_one_of(",]")
            return
        name = yield from source.word(_NAME)
        if (yield from source.takes(CALL_ID)):
            yield from source.word(_NAME)
        yield from source.takes(ARGS)
        yield from source.space()
        if (yield from source.peek()) == "{":
            sink.begin(name)
        yield from read_object(source, sink.arguments)

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        return f"{writer.literal(tool.name)} {writer.mark(ARGS)} {writer.arguments(tool)}"


class MistralList(Mistral):
    """One mark, and a list of all calls."""

    marks = (OPENING,)

    def is_of(self, template: str) -> bool:
        return OPENING in template

    def forced(self, writer: GrammarWriter, tools: Sequence[Tool], most: int) -> str:
        return f"{writer.mark(OPENING)} {self._list(writer, tools, most)}"

    def mixed(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        return writer.mixed(OPENING, self._list(writer, tools, most), 1)

    def _list(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        calls = writer.repeated(self._any_call(writer, tools), '", "', most)
        return f'" "? "[" {calls} "]"'

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        return json_call(writer, tool)
