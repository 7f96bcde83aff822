"""A model family: how it writes calls, and the grammar that has it write one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .grammar import GrammarWriter
from .parser import CallSink, random_id
from .schemas import Tool, Tools
from .source import Delimiters, Reading, Source, Unreadable


class CallFamily(Protocol):
    """How a family writes calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts around calls, which stay in the text where they are special tokens."""
        ...

    def is_of(self, template: str) -> bool:
        """Whether a chat template is one of this family."""
        ...

    def read(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        """Reads all text, and hands what it is to ``sink``."""
        ...

    def new_id(self) -> str:
        """The id of a call, as the family's template takes it back."""
        ...

    def forced(self, writer: GrammarWriter, tools: Sequence[Tool], most: int) -> str:
        """The expression of 1 to ``most`` calls of ``tools``, and nothing else."""
        ...

    def answer(self, writer: GrammarWriter, form: str) -> str:
        """The expression of an answer of this form that is no call."""
        ...

    def mixed(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        """The expression of any text and up to ``most`` calls of ``tools``; None for any number."""
        ...


class PlainAnswers:
    """A family whose answers have no marks, and whose calls have ids in OpenAI's form."""

    def new_id(self) -> str:
        return random_id()

    def answer(self, writer: GrammarWriter, form: str) -> str:
        return form


class MarkedFamily(PlainAnswers):
    """A family whose calls each begin with a mark."""

    opening: str
    marks: tuple[str, ...]
    blank = r"\n{1,2}"  # that may stand before a call

    def read(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        openings = Delimiters(self.opening)
        while (mark := (yield from source.until(openings, sink.text))) is not None:
            source.record(mark)
            try:
                yield from self.read_call(source, sink, tools)
            except Unreadable:
                sink.text(source.recorded())

    def forced(self, writer: GrammarWriter, tools: Sequence[Tool], most: int) -> str:
        blank = f"{writer.regex(self.blank)}?"
        call = f"{writer.mark(self.opening)} {self._any_call(writer, tools)}"
        return f"{blank} {writer.repeated(call, blank, most)}"

    def mixed(self, writer: GrammarWriter, tools: Sequence[Tool], most: int | None) -> str:
        return writer.mixed(self.opening, self._any_call(writer, tools), most)

    def _any_call(self, writer: GrammarWriter, tools: Sequence[Tool]) -> str:
        return writer.one_of(self.call(writer, tool) for tool in tools)

    def read_call(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        """Reads a call behind its mark. Raises ``Unreadable``."""
        raise NotImplementedError

    def call(self, writer: GrammarWriter, tool: Tool) -> str:
        """The expression of a call of ``tool`` behind its mark."""
        raise NotImplementedError
