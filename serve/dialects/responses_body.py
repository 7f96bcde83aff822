"""Bodies of ``/v1/responses``: items in, the messages, tools and parameters of chat completions out."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from ..bodies import ChatBody, JsonObject, JsonSchema, ResponseFormat, decode, invalid
from ..errors import ApiError
from .conversation import SharedFields, Turns, function_tool, named_tool, need, unsupported

_TEXTS = {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}
_CHAT = "; /v1/chat/completions has them"
T = TypeVar("T", bound=msgspec.Struct)
# The body's fields by the engine's names.
NAMES = {
    "messages": "input",
    "max_model_len": "input",
    "max_tokens": "max_output_tokens",
    "structured_outputs": "text.format",
    "structured_outputs.json": "text.format.schema",
    "template_kwargs": "chat_template_kwargs",
}


class ContentPart(msgspec.Struct):
    """A part of a message, an output or a reasoning item."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart]


class MessageItem(msgspec.Struct):
    """``{"type": "message"}``, of any role; the type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(msgspec.Struct):
    """``{"type": "reasoning"}`` of an earlier answer."""

    content: list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class CallItem(msgspec.Struct):
    """``{"type": "function_call"}`` of an earlier answer."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct):
    """``{"type": "function_call_output"}``: what the client's function gave."""

    call_id: str
    output: Content


class ResponsesTool(msgspec.Struct):
    """A tool; functions alone are served."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, rename={"definition": "schema"}):
    """``text.format``: any text, or JSON."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    definition: JsonObject | None = None


class TextOptions(msgspec.Struct):
    """``text`` of a body."""

    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct):
    """``reasoning`` of a body. Its effort goes to the chat template."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SharedFields, kw_only=True):
    """Body of ``/v1/responses``."""

    input: str | list[JsonObject]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    include: list[str] | None = None
    # refused where they ask for something
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    truncation: str | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Raises ``ApiError`` for what is not served, with what to do instead."""
        wants_logprobs = "message.output_text.logprobs" in (self.include or ())
        refused = {
            "background": (self.background, "answers are made while the client waits; send stream=true"),
            "conversation": (
                self.conversation,
                "none are kept; use previous_response_id, or send all items",
            ),
            "prompt": (self.prompt, "none are kept; send instructions and input"),
            "context_management": (self.context_management, "nothing is compacted; send fewer items"),
            "moderation": (self.moderation, "nothing is moderated"),
            "truncation": (self.truncation not in (None, "disabled"), "no input is cut; send fewer items"),
            "top_logprobs": (self.top_logprobs, f"responses have no log-probabilities{_CHAT}"),
            "include": (wants_logprobs, f"responses have no log-probabilities{_CHAT}"),
        }
        for field, (is_asked, instead) in refused.items():
            if is_asked:
                raise unsupported(field, f"{field} is not supported: {instead}")

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept for ``previous_response_id``; OpenAI's default."""
        return self.store is not False

    def messages(self) -> list[JsonObject]:
        """The items as messages. Raises ``ApiError``."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise ApiError(400, "is empty", param="input")
        turns = Turns()
        for number, item in enumerate(self.input):
            _add_item(turns, item, f"input[{number}]")
        return turns.messages

    def chat(self, messages: list[JsonObject]) -> ChatBody:
        """The body of chat completions. Raises ``ApiError``."""
        effort = None if self.reasoning is None else self.reasoning.effort
        thinks, effort = (False, None) if effort == "none" else (None, effort)
        return self.as_chat(
            messages,
            max_tokens=self.max_output_tokens,
            tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or ())] or None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if self.text is None else _format(self.text.format),
            chat_template_kwargs=self.template_variables(thinks, effort),
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_retention=self.prompt_cache_retention,
        )


class Asked(NamedTuple):
    """A body, and the same as one of chat completions."""

    body: ResponsesBody
    chat: ChatBody


def read_responses(data: bytes) -> Asked:
    """The body in ``data``, checked. Raises ``ApiError``."""
    body = decode(data, ResponsesBody)
    body.check()
    return Asked(body, body.chat(body.messages()))


def _add_item(turns: Turns, item: JsonObject, field: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        message = _read(item, MessageItem, field)
        text = _text(message.content, f"{field}.content")
        if message.role == "assistant":
            turns.answer(text)
        else:
            turns.add("user" if message.role == "user" else "system", text)
    elif kind == "reasoning":
        reasoning = _read(item, ReasoningItem, field)
        place = "content" if reasoning.content else "summary"
        if text := _text(reasoning.content or reasoning.summary or "", f"{field}.{place}"):
            turns.think(text)
    elif kind == "function_call":
        call = _read(item, CallItem, field)
        turns.call(call.call_id, call.name, call.arguments)
    elif kind == "function_call_output":
        output = _read(item, CallOutputItem, field)
        turns.add("tool", _text(output.output, f"{field}.output"), tool_call_id=output.call_id)
    elif kind == "item_reference":
        raise unsupported(f"{field}.type", "references are not supported: send the item, or previous_response_id")
    else:
        known = "messages, reasoning, function calls and their outputs"
        raise unsupported(f"{field}.type", f"{str(kind)[:40]!r} is not supported: send {known}")


def _read(item: JsonObject, kind: type[T], field: str) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise invalid(error, field) from error


def _text(content: Content, field: str) -> str:
    """The text of all parts. Raises ``ApiError`` for other parts."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise unsupported(f"{field}[{number}].type", f"{part.type[:40]!r} is not supported: send text")
        texts.append(need(part.refusal if part.type == "refusal" else part.text, f"{field}[{number}].text"))
    return "\n".join(texts)


def _tool(tool: ResponsesTool, field: str) -> JsonObject:
    if tool.type != "function":
        remedy = "no tools are built in; send a function, and run it"
        raise unsupported(f"{field}.type", f"{tool.type[:40]!r} is not supported: {remedy}")
    return function_tool(need(tool.name, f"{field}.name"), tool.description, tool.parameters, tool.strict)


def _choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    """A ``tool_choice`` as chat completions have it."""
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise unsupported("tool_choice", 'send "none", "auto", "required" or a function\'s type and name')
        return named_tool(choice["name"])
    return choice


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    return ResponseFormat(form.type, JsonSchema(need(form.definition, "text.format.schema")))
