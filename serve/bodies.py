"""Bodies of requests: read under limits, decoded into typed structs, turned into the engine's parameters.

Fields are OpenAI's, beside them vLLM's extensions and the engine's own; unknown fields are ignored. ``null`` is the
same as nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from starlette.requests import Request

from qkv_engine import SamplingParams, StructuredOutputs

from .errors import ApiError, ClientGoneError
from .fair_threads import Load
from .frontend import Frontend
from .limits import Limits

MAX_PROMPTS = 256  # of one request to /v1/completions
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, OpenAI's
T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
Ids = list[int]
JsonObject = dict[str, Any]
Messages = Annotated[list[JsonObject], msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a body."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, rename={"definition": "schema"}):
    """``json_schema`` of a response format."""

    definition: JsonObject = {}


class ResponseFormat(msgspec.Struct):
    """``response_format`` of a body."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured(self) -> StructuredOutputs | None:
        """The form in the engine's words; None for any text. Raises ``ApiError``."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        if self.json_schema is None:
            raise ApiError(400, "is missing", param="response_format.json_schema")
        return StructuredOutputs(json=self.json_schema.definition)


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that both ``/v1/completions`` and ``/v1/chat/completions`` have; most are those of ``SamplingParams``."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Ids | None = None
    no_repeat_ngram_size: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    return_token_ids: bool | None = None
    # the engine's own
    kv_floor: str | None = None
    kv_pinned: bool | None = None
    retain: str | float | None = None
    session: str | None = None
    # refused where they ask for something
    suffix: str | None = None
    best_of: int | None = None
    functions: list[Any] | None = None
    audio: JsonObject | None = None

    prompt_field: ClassVar[str]

    def changes(self) -> JsonObject:
        """The sampling parameters that the body names. Raises ``ApiError`` for a field that cannot be honoured."""
        self._refuse_unsupported()
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.response_format is not None and (structured := self.response_format.structured()) is not None:
            if self.structured_outputs is not None:
                raise ApiError(400, "give one form, this or response_format", param="structured_outputs")
            given["structured_outputs"] = structured
        if self.session is None and self.prompt_cache_key is not None:
            given["session"] = self.prompt_cache_key
        if self.retain is None and self.prompt_cache_retention == "24h":
            given["retain"] = self.prompt_cache_retention
        return given | self._own_changes()

    def renamed(self) -> dict[str, str]:
        """Fields of the body by the name of the sampling parameter that they gave, where the two differ."""
        names = {"max_model_len": self.prompt_field}
        if self.session is None:
            names["session"] = "prompt_cache_key"
        if self.structured_outputs is None:
            schema = "response_format.json_schema.schema"
            names |= {"structured_outputs": "response_format", "structured_outputs.json": schema}
        return names

    def _own_changes(self) -> JsonObject:
        return {}

    def _refuse_unsupported(self) -> None:
        asked = {
            "suffix": bool(self.suffix),
            "best_of": self.best_of not in (None, self.n or 1),
            "functions": bool(self.functions),
            "audio": self.audio is not None,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_SAMPLING = set(GenerationBody.__struct_fields__) & set(SamplingParams.__struct_fields__)


class CompletionBody(GenerationBody, kw_only=True):
    """Body of ``/v1/completions``; a prompt is text, token ids, or a list of these."""

    prompt_field = "prompt"
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None

    def _own_changes(self) -> JsonObject:
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        changes: JsonObject = {"max_tokens": max(max_tokens, 1) if self.echo else max_tokens}
        if self.logprobs is not None:
            changes["logprobs"] = self.logprobs
            if self.echo:
                changes["prompt_logprobs"] = self.logprobs
        return changes

    @property
    def echoes_alone(self) -> bool:
        """Whether nothing but the prompt is wanted, with its log-probabilities: no request of the engine is so."""
        return bool(self.echo) and self.max_tokens == 0

    def check_length(self, max_model_len: int) -> None:
        """Raises ``ApiError`` for token ids that leave no room, before any of them is looked at."""
        if isinstance(self.prompt, list) and self._is_one_prompt and len(self.prompt) >= max_model_len:
            message = f"the prompt has {len(self.prompt)} tokens and leaves no room in the context of {max_model_len}"
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")

    def num_prompts(self) -> int:
        """The number of prompts. Raises ``ApiError`` for too many."""
        number = 1 if self._is_one_prompt else len(self.prompt)
        if number > MAX_PROMPTS:
            raise ApiError(400, f"{number} prompts are more than {MAX_PROMPTS}", param="prompt")
        return number

    def prompts(self) -> list[str | Ids]:
        """The prompts one by one; looks at every token id. Raises ``ApiError``."""
        if self._is_one_prompt:
            return [self.prompt]
        given: list[Any] = list(self.prompt)
        for number, prompt in enumerate(given):
            if not (isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) <= {int})):
                raise ApiError(400, "a prompt is a string or a list of token ids", param=f"prompt[{number}]")
        return given

    @property
    def _is_one_prompt(self) -> bool:
        return isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)


class ChatBody(GenerationBody, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    prompt_field = "messages"
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    def _own_changes(self) -> JsonObject:
        changes: JsonObject = {}
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            changes["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return changes

    def renamed(self) -> dict[str, str]:
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().renamed() | limit | {"logprobs": "top_logprobs"}

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def template_kwargs(self) -> JsonObject:
        """Variables of the chat template."""
        given = dict(self.chat_template_kwargs or {})
        return given | {"tools": [_for_template(tool) for tool in self.tools or ()]} if self.has_tools else given


def _for_template(tool: Any) -> Any:
    """A tool without what templates do not know: whether its arguments must meet their schema."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "strict" not in function:
        return tool
    return tool | {"function": {name: value for name, value in function.items() if name != "strict"}}


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Ids


async def read_body(request: Request, kind: type[T], frontend: Frontend) -> tuple[T, Load]:
    """The JSON body of ``request`` as a ``kind``, and whose it is. Raises ``ApiError`` and ``ClientGoneError``."""
    return await read_with(request, lambda body: decode(body, kind), frontend)


async def read_with(request: Request, read: Callable[[bytes], R], frontend: Frontend) -> tuple[R, Load]:
    """What ``read`` makes of the body of ``request``, and whose it is.

    Raises ``ApiError`` and ``ClientGoneError``.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can send no JSON without being allowed to; its other requests all name the site, and
    # those of programs, such as ``curl -d``, name none.
    if media_type != "application/json" and "origin" in request.headers:
        raise ApiError(415, "send a JSON body, with the header Content-Type: application/json")
    tenant: str = request.state.tenant
    with frontend.seats.held(tenant):
        body = await read_bytes(request, frontend.limits)
        load = Load(tenant, len(body))
        return await frontend.threads.read(load, body, read), load


def decode(body: bytes, kind: type[T]) -> T:
    """JSON as a ``kind``. Raises ``ApiError`` with the path of the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


def invalid(error: msgspec.ValidationError, field: str = "") -> ApiError:
    """The error of a value that is not what its place wants; ``field`` is the path of what was read."""
    message, _, place = str(error).partition(" - at ")
    found = re.search(r"`\$([^`]+)`$", place)
    param = field + (found[1] if found else "")
    return ApiError(400, message, param=param.removeprefix(".") or None)


async def read_bytes(request: Request, limits: Limits) -> bytes:
    """The body of ``request``. Raises ``ApiError`` for one that is too long or too slow, and ``ClientGoneError``."""
    too_large = ApiError(413, f"the body is longer than {limits.max_body} bytes", code="request_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limits.max_body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > limits.max_body:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {limits.read_timeout:g} s") from error
