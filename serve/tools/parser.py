"""Tool calls in a completion's text, taken out as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from uuid import uuid4

from .schemas import Tools
from .source import Reading, Source


class CallDelta(NamedTuple):
    """A call that begins, with its ``call_id`` and ``name``, or more of its arguments.

    Fields
        number: of the call among those of its completion.
        arguments: the next characters of a JSON object.
    """

    number: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ReadsCalls(Protocol):
    """The part of a family that a parser needs."""

    def read(self, source: Source, sink: CallSink, tools: Tools) -> Reading[None]:
        """Reads all text, and hands what it is to ``sink``."""
        ...

    def new_id(self) -> str:
        """The id of a call, as the family's template takes it back."""
        ...


class CallSink:
    """What a family's reader has found. White space before a call, and behind the last one, is left out."""

    def __init__(self, source: Source, new_id: Callable[[], str]):
        self.num_calls = 0
        self._source, self._new_id = source, new_id
        self._found: list[tuple[CallDelta | None, list[str]]] = []  # None for text; joined when they are taken
        self._blank: list[str] = []

    def text(self, text: str) -> None:
        """Text that is no call."""
        shown = text.rstrip()
        if not shown:
            self._blank.append(text)
            return
        self._add(None, (*self._blank, shown))
        self._blank = [text[len(shown) :]]

    def begin(self, name: str) -> None:
        """A call begins: what was read of it is no text any more."""
        self._source.forget()
        self._blank.clear()
        self._found.append((CallDelta(self.num_calls, self._new_id(), name), []))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that has begun, as JSON."""
        self._add(CallDelta(self.num_calls - 1), (text,))

    def take(self, *, is_last: bool) -> list[str | CallDelta]:
        """What was found since the last time, in order."""
        if is_last and not self.num_calls and any(self._blank):
            self._add(None, self._blank)
        found, self._found = self._found, []
        return [_joined(call, "".join(pieces)) for call, pieces in found]

    def _add(self, call: CallDelta | None, texts: Iterable[str]) -> None:
        """Adds to what was found last if it is the same, text or this call."""
        last = self._found[-1][0] if self._found else None
        if not self._found or (last is None) != (call is None):
            self._found.append((call, []))
        self._found[-1][1].extend(texts)


def _joined(call: CallDelta | None, text: str) -> str | CallDelta:
    return text if call is None else call._replace(arguments=text)


class ToolCallParser:
    """Takes tool calls out of a completion's text as it comes. A call that cannot be read stays text.

    A call is one as soon as its name and the beginning of its arguments have come. Where these turn out to be no JSON
    they end there, and what follows is text.
    """

    def __init__(self, family: ReadsCalls, tools: Tools, *, calls_once: bool = False):
        """``calls_once`` leaves out calls after the first."""
        self._calls_once = calls_once
        self._source = Source()
        self._sink = CallSink(self._source, family.new_id)
        self._reading = family.read(self._source, self._sink, tools)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, text: str, *, is_last: bool) -> list[str | CallDelta]:
        """What is certain after ``text`` more: pieces of text that are no call, and parts of calls, in order."""
        self._source.add(text, is_last=is_last)
        next(self._reading, None)
        found = self._sink.take(is_last=is_last)
        return [each for each in found if isinstance(each, str) or not (self._calls_once and each.number)]


def random_id() -> str:
    """An id of a call in OpenAI's form."""
    return f"call_{uuid4().hex[:24]}"
