"""gpt-oss: a message to a function, in the channel "commentary".

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The engine tells messages apart (``engine/text/channels.py``) and leaves in the text those that go to somebody, header
included. Source: OpenAI's harmony, https://github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qkv_engine.text.channels import CALL_MESSAGE, CHANNEL, CONSTRAIN, MESSAGE, START

from .family import PlainAnswers
from .grammar import GrammarWriter
from .json_reading import read_object
from .parser import CallSink
from .schemas import Tool, Tools
from .source import MAX_NAME_CHARS, Delimiters, Reading, Source, Unreadable

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_STARTS, _ENDS = Delimiters(CALL_MESSAGE), Delimiters(MESSAGE)


class GptOss(PlainAnswers):
    """Calls in messages of their own."""

    marks: tuple[str, ...] = ()  # the engine writes them out

    def is_of(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def read(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        while (mark := (yield from source.until(_STARTS, sink.text))) is not None:
            source.record(mark)
            try:
                name = yield from _read_header(source)
                yield from source.space()
                if (yield from source.peek()) == "{":
                    sink.begin(name)
                yield from read_object(source, sink.arguments)
            except Unreadable:
                sink.text(source.recorded())

    def forced(self, writer: GrammarWriter, tools: Sequence[Tool], most: int) -> str:
        """One call: its message ends the answer."""
        return f"{_begin(writer)} {self._any_call(writer, tools)}"

    def answer(self, writer: GrammarWriter, form: str) -> str:
        return f"{_begin(writer)} {writer.literal('final')} {writer.mark(MESSAGE)} {form}"

    def mixed(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        text = writer.regex(r"(.|\n)+")
        preamble = f"{writer.literal('commentary')} {writer.mark(MESSAGE)} {text}? {writer.mark('<|end|>')}"
        say = f"{preamble} {writer.mark(START)} {writer.literal('assistant')} {writer.mark(CHANNEL)}"
        final = f"{writer.literal('final')} {writer.mark(MESSAGE)} {text}?"
        last = writer.one_of((final, self._any_call(writer, tools)))
        return f"{_begin(writer)} ({say})? {last}"

    def _any_call(self, writer: GrammarWriter, tools: Sequence[Tool]) -> str:
        return writer.one_of(self._call(writer, tool) for tool in tools)

    def _call(self, writer: GrammarWriter, tool: Tool) -> str:
        head = writer.literal(f"commentary to=functions.{tool.name} ")
        form = f"{writer.mark(CONSTRAIN)} {writer.literal('json')} {writer.mark(MESSAGE)}"
        return f"{head} {form} {writer.arguments(tool)}"


def _begin(writer: GrammarWriter) -> str:
    """The beginning of a message: the prompt, or the analysis before it, may have said whose it is."""
    return f"({writer.mark(START)} {writer.literal('assistant')})? {writer.mark(CHANNEL)}"


def _read_header(source: Source) -> Reading[str]:
    """The name of the function that a message goes to, whose text follows. Raises ``Unreadable``."""
    header: list[str] = []
    if (yield from source.until(_ENDS, header.append)) is None:
        raise Unreadable
    found = _RECIPIENT.search("".join(header)[:MAX_NAME_CHARS])
    if found is None:
        raise Unreadable
    return found[1]
