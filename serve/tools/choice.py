"""What a request asks of its tools: which may be called, which must be, and the grammar that has it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv_engine import StructuredOutputs
from qkv_engine.text.tokenizer import Tokenizer

from ..bodies import ChatBody, JsonObject
from ..errors import ApiError
from .families import HERMES, find_family
from .family import CallFamily
from .grammar import GrammarWriter
from .parser import ToolCallParser
from .schemas import Tool, Tools, read_tools

MAX_CALLS = 16  # of one forced answer: a model need not know where to stop


class ToolUse:
    """The tools of a request to a model, whose tokenizer is None for a bare shape."""

    def __init__(self, body: ChatBody, tokenizer: Tokenizer | None):
        """Raises ``ApiError`` for a choice that cannot be honoured."""
        self._tokenizer = tokenizer
        self._given = read_tools(body.tools or ()) if body.has_tools else []
        self._forced = _forced(body, self._given)
        self._calls_once = body.parallel_tool_calls is False
        self._most = 1 if self._calls_once or isinstance(body.tool_choice, dict) else MAX_CALLS
        template = None if tokenizer is None else tokenizer.tool_template
        family = find_family(template) if body.has_tools else None
        self._family = HERMES if family is None and self._forced else family
        self._tools = Tools(self._given)

    def parser(self) -> ToolCallParser | None:
        """A parser of one completion; None where it holds no calls."""
        return None if self._family is None else ToolCallParser(self._family, self._tools, calls_once=self._calls_once)

    def changes(self, answer: StructuredOutputs | None) -> JsonObject:
        """Sampling parameters that calls need. ``answer`` is the form that the body asks for. Raises ``ApiError``."""
        family, tokenizer = self._family, self._tokenizer
        if family is None or tokenizer is None:
            return {}
        try:
            start = self._start(family, GrammarWriter(tokenizer), answer)
        except RecursionError as error:
            raise ApiError(400, "a schema is nested too deeply", param="tools") from error
        kept = [tokenizer.token_of(mark) for mark in family.marks]
        changes: JsonObject = {"kept_token_ids": [each for each in kept if each in tokenizer.special_ids]}
        if start is not None:
            changes["structured_outputs"] = StructuredOutputs(grammar=start)
        return changes

    def _start(self, family: CallFamily, writer: GrammarWriter, answer: StructuredOutputs | None) -> str | None:
        """The grammar of the answer; None where nothing is asked of it, or nothing but ``answer``."""
        if self._forced:
            if answer is not None:
                message = "a call is forced, which has a form of its own: leave out tool_choice or the other form"
                raise ApiError(400, message, param="tool_choice")
            return writer.grammar(family.forced(writer, self._forced, self._most))
        if answer is not None and self._given:
            form = _json_of(answer)
            if form is None:
                return None
            calls = family.forced(writer, self._given, self._most)
            return writer.grammar(f"{family.answer(writer, writer.json(form, is_strict=True))} | {calls}")
        if any(tool.is_strict for tool in self._given):
            return writer.grammar(family.mixed(writer, self._given, 1 if self._calls_once else None))
        return None


def _forced(body: ChatBody, given: Sequence[Tool]) -> list[Tool]:
    """The tools of which one must be called; none where the model may answer instead. Raises ``ApiError``."""
    choice, field = body.tool_choice, "tool_choice"
    if choice in (None, "none", "auto"):
        return []
    name = _named(choice) if isinstance(choice, dict) else None
    if choice != "required" and name is None:
        message = 'send "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise ApiError(400, message, param=field, code="unsupported_parameter")
    if not given:
        raise ApiError(400, "needs tools, functions with a name", param=field)
    found = [tool for tool in given if name in (None, tool.name)]
    if not found:
        raise ApiError(400, f"{str(name)[:80]!r} is none of the tools", param=field)
    return found


def _json_of(answer: StructuredOutputs) -> JsonObject | None:
    """The schema of an answer; None for one of another form, beside which no call fits."""
    if answer.json_object:
        return {"type": "object"}
    return answer.json if isinstance(answer.json, dict) else None


def _named(choice: dict[str, Any]) -> str | None:
    function = choice.get("function")
    name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
    return name if isinstance(name, str) else None
