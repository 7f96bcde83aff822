"""Llama 3.1 to 3.3: an answer that is ``{"name": ..., "parameters": {...}}``, perhaps behind ``<|python_tag|>``.

Several stand behind one another, or with ";" between them. Source: Meta's model card of Llama 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .family import PlainAnswers
from .grammar import GrammarWriter
from .hermes import json_call
from .json_reading import read_bare_call
from .parser import CallSink
from .schemas import Tool, Tools
from .source import SPACE, Delimiters, Reading, Source, Unreadable

TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[\s;]+")
_TAGS = Delimiters(TAG)


class Llama(PlainAnswers):
    """A call is an answer of its own, or stands behind a mark; its name must be a tool's."""

    marks = (TAG,)

    def is_of(self, template: str) -> bool:
        return TAG in template or '"parameters": dictionary of argument' in template

    def read(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        blank: list[str] = []
        yield from source.run(SPACE, blank.append)
        sink.text("".join(blank))
        has_mark = yield from source.takes(TAG)
        while True:
            source.record(TAG if has_mark else "")
            try:
                yield from source.space()
                yield from read_bare_call(source, sink, tools.__contains__)
                source.record()
                yield from source.run(_BETWEEN, lambda text: None)
                has_mark = yield from source.takes(TAG)
                if has_mark or (yield from source.peek()) == "{":
                    continue
            except Unreadable:
                pass
            sink.text(source.recorded())
            if (yield from source.until(_TAGS, sink.text)) is None:
                return
            has_mark = True

    def forced(self, writer: GrammarWriter, tools: Sequence[Tool], most: int) -> str:
        return writer.repeated(self._any_call(writer, tools), '"; "', most)

    def mixed(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        calls = writer.repeated(self._any_call(writer, tools), '"; "', most)
        text = writer.text_not_after("{")
        if writer.token(TAG) is None:
            return f"{calls} | {text}"
        return f"{writer.mark(TAG)}? {calls} | {text} ({writer.mark(TAG)} {calls})?"

    def _any_call(self, writer: GrammarWriter, tools: Sequence[Tool]) -> str:
        return writer.one_of(json_call(writer, tool, "parameters") for tool in tools)
