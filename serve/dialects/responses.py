"""``/v1/responses``: OpenAI's Responses, kept for ``previous_response_id`` as long as there is room."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..bodies import JsonObject, read_with
from ..errors import RESPONSES, ApiError
from ..generate import GenerationRequest, frontend_of, generate, json_response
from ..tools.choice import ToolUse
from ..tools.history import for_template
from .conversation import unsupported, with_system
from .response_store import ResponseStore, StoredResponse
from .responses_answer import ResponsesAnswer
from .responses_body import NAMES, read_responses


def responses_routes(store: ResponseStore) -> list[Route]:
    """The routes of the dialect, whose responses are kept in ``store``."""

    async def answer(request: Request) -> Response:
        """``POST /v1/responses``."""
        frontend = frontend_of(request)
        asked, load = await read_with(request, read_responses, frontend)
        body, answer_id, tenant = asked.body, f"resp_{request.state.own_id}", load.tenant
        before = None if body.previous_response_id is None else _previous(store, tenant, body.previous_response_id)
        conversation: list[JsonObject] = []
        is_stored = body.is_stored and store.max_bytes > 0

        def prompts() -> list[list[JsonObject]]:
            earlier = [] if before is None else msgspec.json.decode(before.messages)
            conversation[:] = [*earlier, *asked.chat.messages]
            return [for_template(with_system(body.instructions, conversation), frontend.threads)]

        def keep(response: JsonObject, answer: list[JsonObject]) -> None:
            if is_stored:
                messages = msgspec.json.encode([*conversation, *answer])
                store.put(tenant, answer_id, StoredResponse(msgspec.json.encode(response), messages))

        chat, tools = asked.chat, ToolUse(asked.chat, frontend.engine.tokenizer)
        answer = ResponsesAnswer(asked, answer_id, frontend.name, tools, keep, is_stored=is_stored)
        kwargs = chat.template_kwargs()
        work = GenerationRequest(
            chat, load, answer, answer, answer_id, NAMES, prompts, template_kwargs=kwargs, tools=tools
        )
        return await generate(request, work)

    async def retrieve(request: Request) -> Response:
        """``GET /v1/responses/ID``."""
        if request.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "stream is not supported: events are sent once, as the answer is made")
        found = store.get(request.state.tenant, response_id := request.path_params["response_id"])
        if found is None:
            raise _unknown(response_id)
        return Response(found.response, media_type="application/json")

    async def delete(request: Request) -> Response:
        """``DELETE /v1/responses/ID``."""
        if not store.delete(request.state.tenant, response_id := request.path_params["response_id"]):
            raise _unknown(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    one = f"{RESPONSES}/{{response_id}}"
    return [
        Route(RESPONSES, answer, methods=["POST"]),
        Route(one, retrieve, methods=["GET"]),
        Route(one, delete, methods=["DELETE"]),
    ]


def _previous(store: ResponseStore, tenant: str, response_id: str) -> StoredResponse:
    field, found = "previous_response_id", store.get(tenant, response_id)
    if found is not None:
        return found
    if not store.max_bytes:
        raise unsupported(field, "this server keeps no responses: send the earlier items in input")
    message = f"{response_id[:80]!r} is not kept, or no longer: send the earlier items in input"
    raise ApiError(400, message, param=field, code="previous_response_not_found")


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id[:80]!r}, or no longer", param="response_id")
