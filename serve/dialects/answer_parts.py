"""An answer as the parts that dialects write one after another: reasoning, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from uuid import uuid4

from qkv_engine import CompletionOutput, RequestOutput
from qkv_engine.text.reasoning import find_marks
from qkv_engine.text.tokenizer import Tokenizer

from ..bodies import ChatBody, JsonObject
from ..tools import ToolCallParser, writes_calls
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

    def __init__(self, body: ChatBody, tokenizer: Tokenizer | None, *, calls_once: bool = False):
        """``calls_once`` leaves out calls after the first."""
        self.parts: list[AnswerPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        has_calls = body.has_tools and tokenizer is not None and writes_calls(tokenizer.chat_template)
        self._parser = ToolCallParser() if has_calls else None
        self._calls_once, self._call_index = calls_once, -1  # of the last call
        self._blank = ""  # white space that may turn out to stand before a call
        self._reasoning = _ReasoningTokens(tokenizer)

    @property
    def has_called(self) -> bool:
        """Whether the model stopped to get the results of its calls."""
        return self.finish_reason == "stop" and self._call_index >= 0

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.number

    def begin(self, output: RequestOutput) -> None:
        """Looks at the first output, for whether its prompt ends within reasoning."""
        self._reasoning.begin(output.prompt_token_ids)

    def read(self, delta: CompletionOutput) -> list[tuple[AnswerPart, str]]:
        """What is new, each text with the part that it was added to; a part is complete when another one comes."""
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self._reasoning.count(delta.token_ids)
        text, calls = delta.text, list[JsonObject]()
        if self._parser is not None:
            is_last = delta.finish_reason is not None
            text, calls = self._parser.push(text, is_last=is_last)
            text = self._without_blank(text, is_last=is_last and not calls)
        news = [self._add("reasoning", delta.reasoning)] if delta.reasoning else []
        news += [self._add("text", text)] if text else []
        return news + [self._add_call(call) for call in calls if not (self._calls_once and call["index"])]

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

    def _without_blank(self, text: str, *, is_last: bool) -> str:
        """``text`` without white space at its end, held back until more text comes: before a call it is left out."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        is_text = bool(shown) or (bool(self.parts) and self.parts[-1].kind == "text")
        return text if is_last and is_text else shown

    def _add_call(self, call: JsonObject) -> tuple[AnswerPart, str]:
        """A call, or more of the arguments of the last one."""
        function = call["function"]
        if call["index"] != self._call_index:
            self._call_index, self._blank = call["index"], ""
            self.parts.append(AnswerPart("call", len(self.parts), call_id=call["id"], name=function["name"]))
        return self._add("call", function.get("arguments") or "")

    def _add(self, kind: Kind, text: str) -> tuple[AnswerPart, str]:
        if not self.parts or self.parts[-1].kind != kind:
            self.parts.append(AnswerPart(kind, len(self.parts)))
        part = self.parts[-1]
        part.add(text)
        return part, text


class _ReasoningTokens:
    """The number of output tokens up to the end of the reasoning, its marks among them."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.number = 0
        self._marks = None if tokenizer is None else find_marks(tokenizer)
        self._is_open = False

    def begin(self, prompt_ids: Sequence[int]) -> None:
        if self._marks is not None:
            self._is_open = self._marks.after(prompt_ids).is_open

    def count(self, token_ids: Sequence[int]) -> None:
        if self._marks is None:
            return
        for token_id in token_ids:
            self._is_open = self._is_open or (not self.number and token_id == self._marks.opening)
            self.number += self._is_open
            if token_id == self._marks.closing:
                self._is_open = False
