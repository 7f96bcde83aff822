"""Bodies of ``/v1/messages``: blocks in, the messages, tools and parameters of chat completions out."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ..bodies import ChatBody, JsonObject, JsonSchema, ResponseFormat, decode
from ..errors import ApiError
from .conversation import SharedFields, Turns, function_tool, named_tool, need, unsupported, with_system

# A line that Claude Code puts before its system prompt. It differs in every request and would spoil the prefix cache.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The body's fields by the engine's names.
NAMES = {
    "max_model_len": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "structured_outputs.json": "output_config.format.schema",
    "template_kwargs": "chat_template_kwargs",
}


class CacheControl(msgspec.Struct):
    """``cache_control`` of a block or a tool: for how long the prompt up to there is kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class ContentBlock(msgspec.Struct):
    """A block of a message's content; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    cache_control: CacheControl | None = None


class InputMessage(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class MessagesTool(msgspec.Struct):
    """A tool; those that the client runs by a schema are served."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(msgspec.Struct):
    """``tool_choice`` of a body."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """``thinking`` of a body: goes to the chat template. No budget is enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, rename={"definition": "schema"}):
    """``output_config.format``: JSON of a schema."""

    type: Literal["json_schema"]
    definition: JsonObject


class OutputConfig(msgspec.Struct):
    """``output_config`` of a body. Its effort goes to the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(SharedFields, kw_only=True):
    """Body of ``/v1/messages/count_tokens``: the fields that make the prompt."""

    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    # refused where they ask for something
    mcp_servers: Any = None
    container: Any = None

    def chat(self, **own: Any) -> ChatBody:
        """The body of chat completions, with more fields of the ``own``. Raises ``ApiError``."""
        if self.mcp_servers:
            raise unsupported("mcp_servers", "no servers of tools are called: send tools, and run them")
        if self.container:
            raise unsupported("container", "no code is run: send tools, and run them")
        config = self.output_config or OutputConfig()
        form = config.format and ResponseFormat("json_schema", JsonSchema(config.format.definition))
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        if self.retain is None:
            own["retain"] = self._retention()
        return self.as_chat(
            self._messages(),
            tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or ())] or None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            response_format=form,
            chat_template_kwargs=self.template_variables(thinks, config.effort),
            **own,
        )

    def _retention(self) -> str | None:
        """The longest time that ``cache_control`` asks for. It holds for the whole prompt, not just up to its block."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        marks = [each.cache_control for each in (*blocks, *(self.tools or ())) if each.cache_control is not None]
        times = {mark.ttl for mark in marks}
        return "1h" if "1h" in times else "5min" if times else None

    def _messages(self) -> list[JsonObject]:
        turns = Turns()
        for number, message in enumerate(self.messages):
            _add_message(turns, message, f"messages[{number}]")
        if turns.messages and turns.messages[-1]["role"] == "assistant":
            remedy = "an answer that is begun cannot be continued: end with a message of the user"
            raise unsupported(f"messages[{len(self.messages) - 1}].role", remedy)
        system = _text(self.system, "system") if self.system is not None else ""
        return with_system(_BILLING.sub("", system, count=1) if _BILLING.match(system) else system, turns.messages)


class MessagesBody(CountBody, kw_only=True):
    """Body of ``/v1/messages``."""

    max_tokens: int
    stop_sequences: list[str] | None = None

    def whole_chat(self) -> ChatBody:
        """The body of chat completions. Raises ``ApiError``."""
        return self.chat(max_tokens=self.max_tokens, stop=self.stop_sequences or None)


class AskedMessages(NamedTuple):
    """A body, and the same as one of chat completions."""

    body: MessagesBody
    chat: ChatBody


def read_messages(data: bytes) -> AskedMessages:
    """The body in ``data``. Raises ``ApiError``."""
    body = decode(data, MessagesBody)
    return AskedMessages(body, body.whole_chat())


def read_count(data: bytes) -> ChatBody:
    """The body of ``/v1/messages/count_tokens`` in ``data`` as one of chat completions. Raises ``ApiError``."""
    return decode(data, CountBody).chat()


def _add_message(turns: Turns, message: InputMessage, field: str) -> None:
    if isinstance(message.content, str) or message.role == "system":
        text = _text(message.content, f"{field}.content")
        if message.role == "assistant":
            turns.answer(text)
        else:
            turns.add(message.role, text)
        return
    texts: list[str] = []  # of the user, up to a result of a tool
    for number, block in enumerate(message.content):
        place = f"{field}.content[{number}]"
        if message.role == "assistant":
            _add_own(turns, block, place)
        elif block.type == "tool_result":
            _flush(turns, texts)
            result = "" if block.content is None else _text(block.content, f"{place}.content")
            turns.add("tool", result, tool_call_id=need(block.tool_use_id, f"{place}.tool_use_id"))
        else:
            texts.append(_block_text(block, place))
    _flush(turns, texts)
    if not message.content:
        raise ApiError(400, "is empty", param=f"{field}.content")


def _add_own(turns: Turns, block: ContentBlock, field: str) -> None:
    """A block of the assistant."""
    if block.type == "thinking":
        turns.think(need(block.thinking, f"{field}.thinking"))
    elif block.type == "tool_use":
        name, given = need(block.name, f"{field}.name"), need(block.input, f"{field}.input")
        turns.call(need(block.id, f"{field}.id"), name, given)
    elif block.type != "redacted_thinking":  # which nobody here could read
        turns.answer(_block_text(block, field))


def _flush(turns: Turns, texts: list[str]) -> None:
    if texts:
        turns.add("user", "\n".join(texts))
        texts.clear()


def _text(content: str | list[ContentBlock], field: str) -> str:
    """The text of all blocks. Raises ``ApiError`` for other blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{field}[{number}]") for number, block in enumerate(content))


def _block_text(block: ContentBlock, field: str) -> str:
    if block.type != "text":
        raise unsupported(f"{field}.type", f"{block.type[:40]!r} is not supported here: send text")
    text: str = need(block.text, f"{field}.text")
    return text


def _tool(tool: MessagesTool, field: str) -> JsonObject:
    if tool.type not in (None, "custom"):
        remedy = "no tools are built in; send one with an input_schema, and run it"
        raise unsupported(f"{field}.type", f"{tool.type[:40]!r} is not supported: {remedy}")
    return function_tool(tool.name, tool.description, need(tool.input_schema, f"{field}.input_schema"), tool.strict)


def _choice(choice: MessagesToolChoice | None) -> str | JsonObject | None:
    """A ``tool_choice`` as chat completions have it."""
    if choice is None:
        return None
    if choice.type == "tool":
        return named_tool(need(choice.name, "tool_choice.name"))
    return _CHOICES[choice.type]
