"""One request for an answer on its way through the server, whatever dialect it came in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qkv_engine import RequestError, RequestOutput

from .bodies import GenerationBody, JsonObject
from .errors import ApiError, ended, refused
from .events import EventStream, Writer
from .fair_threads import Load
from .frontend import FIRST_TOKEN, Frontend, Generation
from .tools.choice import ToolUse


class WholeAnswer(Protocol):
    """The form of an answer in one piece."""

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The answer made of the finished output of each prompt."""
        ...


class GenerationRequest(NamedTuple):
    """A body, the forms of its answer, and how its prompts are made, which takes long.

    Fields
        names: fields of the body as its client knows them, by the engine's name.
        tools: those that an answer may call.
        shortens: ``max_tokens`` is a bound and not a wish: the rest of the context takes its place where that is less.
    """

    body: GenerationBody
    load: Load
    answer: WholeAnswer
    writer: Writer
    answer_id: str
    names: Mapping[str, str]
    prompts: Callable[[], Sequence[Any]]
    num_prompts: int = 1
    template_kwargs: JsonObject | None = None
    tools: ToolUse | None = None
    shortens: bool = False


async def generate(request: Request, asked: GenerationRequest) -> Response:
    """The answer to ``request``, a stream where its body asks for one. Raises ``ApiError``."""
    frontend, body, tenant = frontend_of(request), asked.body, asked.load.tenant
    frontend.check_model(body.model)
    if tenant and (body.priority or 0) < 0:
        raise ApiError(400, "below 0 no tenant may go: it would be served before the others", param="priority")
    given = body.changes() | {"tenant": tenant, "cache_salt": _salt(tenant, body.cache_salt or "")}
    names = asked.names

    def changes() -> JsonObject:
        nonlocal names
        of_tools = {} if asked.tools is None else asked.tools.changes(given.get("structured_outputs"))
        if "structured_outputs" in of_tools:
            names = {**names, "structured_outputs": "tools"}
        return given | of_tools

    try:
        generation = await frontend.submit(
            asked.load,
            asked.prompts,
            changes,
            asked.answer_id,
            number=asked.num_prompts * max(body.n or 1, 1),
            template_kwargs=asked.template_kwargs,
            is_streamed=bool(body.stream),
            shortens=asked.shortens,
        )
    except RequestError as error:
        raise refused(error, names) from error
    if body.stream:
        return EventStream(generation, asked.writer, request.state.id, names)
    return await _answer(request, generation, asked._replace(names=names))


async def _answer(request: Request, generation: Generation, asked: GenerationRequest) -> Response:
    try:
        on_token = request.scope.get("extensions", {}).get(FIRST_TOKEN)
        outputs = await generation.result(request.receive, on_token)
    finally:
        generation.close()
    for output in outputs:
        if output.error is not None:
            raise ended(output, request.state.id, asked.names)
    return json_response(asked.answer.whole(outputs))


def frontend_of(request: Request) -> Frontend:
    """The frontend of the application that ``request`` came to."""
    frontend: Frontend = request.app.state.frontend
    return frontend


def json_response(value: object) -> Response:
    """The response of ``value`` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def _salt(tenant: str, own: str) -> str:
    """A salt of the tenant's own: from the time of an answer nobody learns what another tenant has asked."""
    return sha256(f"{tenant}\0{own}".encode()).hexdigest() if tenant else own
