"""An answer as the parts that dialects write one after another: reasoning, text, and calls of tools."""

from __future__ import annotations

from typing import Literal
from uuid import uuid4

from qkv_engine import CompletionOutput

from ..bodies import JsonObject
from ..tools.choice import ToolUse
from ..tools.parser import CallDelta
from .conversation import Turns

Kind = Literal["reasoning", "text", "call"]


class AnswerPart:
    """A part of an answer as far as it is known. A call's text is its arguments."""

    __slots__ = ("_pieces", "call_id", "id", "index", "kind", "name")

    def __init__(self, kind: Kind, index: int, *, call_id: str = "", name: str = ""):
        self.kind, self.index, self.id = kind, index, uuid4().hex
        self.call_id, self.name = call_id, name
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Adds what is new."""
        self._pieces.append(text)


class AnswerReader:
    """The one answer to a request, read from a stream's new parts or from the finished completion."""

    def __init__(self, tools: ToolUse):
        self.parts: list[AnswerPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_reasoning_tokens = 0  # the marks of the reasoning included
        self._parser = tools.parser()
        self._call: AnswerPart | None = None  # the last one

    @property
    def has_called(self) -> bool:
        """Whether the model stopped to get the results of its calls."""
        return self.finish_reason == "stop" and self._call is not None

    def read(self, delta: CompletionOutput) -> list[tuple[AnswerPart, str]]:
        """What is new, each text with the part that it was added to; a part is complete when another one comes."""
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_reasoning_tokens = delta.num_reasoning_tokens
        found: list[str | CallDelta] = [delta.text]
        if self._parser is not None:
            found = self._parser.push(delta.text, is_last=delta.finish_reason is not None)
        news = [self._add("reasoning", delta.reasoning)] if delta.reasoning else []
        for each in found:
            if isinstance(each, CallDelta):
                news.append(self._add_call(each))
            elif each:
                news.append(self._add("text", each))
        return news

    def message(self) -> list[JsonObject]:
        """The answer as messages of the assistant in a conversation that goes on."""
        turns = Turns()
        for part in self.parts:
            if part.kind == "reasoning":
                turns.think(part.text)
            elif part.kind == "text":
                turns.answer(part.text)
            else:
                turns.call(part.call_id, part.name, part.text)
        return turns.messages

    def _add_call(self, delta: CallDelta) -> tuple[AnswerPart, str]:
        """A call, or more of the arguments of the last one."""
        if delta.name or self._call is None:
            self._call = AnswerPart("call", len(self.parts), call_id=delta.call_id, name=delta.name)
            self.parts.append(self._call)
        self._call.add(delta.arguments)
        return self._call, delta.arguments

    def _add(self, kind: Kind, text: str) -> tuple[AnswerPart, str]:
        if not self.parts or self.parts[-1].kind != kind:
            self.parts.append(AnswerPart(kind, len(self.parts)))
        part = self.parts[-1]
        part.add(text)
        return part, text
