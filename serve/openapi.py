"""``GET /openapi.json``: all paths, with schemas made of the bodies' structs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from qkv_engine import __version__

from .admin import ResizeBody
from .bodies import ChatBody, CompletionBody, DetokenizeBody, JsonObject, TokenizeBody
from .dialects.messages_body import CountBody, MessagesBody
from .dialects.responses_body import ResponsesBody
from .sessions import SessionBody

PATH = "/openapi.json"
# The body of each path that takes one.
BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/sessions/done": SessionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/resize": ResizeBody,
}
# As in docs/serving.md.
ERRORS = {
    400: "malformed HTTP or JSON, or a field that `param` names",
    401: "no key, or one that is not known",
    403: "figures of all tenants, for another one than the operator",
    404: "no such path, model or response",
    408: "the body did not come in time",
    409: "a size of KV memory that running requests forbid, or nothing to wake with",
    413: "the body is too long, or has too many lists and objects",
    415: "a body of a web page that is not announced as JSON",
    421: "the server was called by a name that is not its own",
    429: "too many completions; `Retry-After` says when to try again",
    500: "the request failed",
    503: "the server is stopping, is out of processes, or its engine has stopped",
    504: "the request did not end in time",
}
_OF_ALL, _OF_BODIES = (401, 421, 500, 503), (400, 404, 408, 413, 415, 429, 504)
_OF_PATHS = {
    "/admin/resize": (409,),
    "/admin/sleep": (400,),
    "/admin/wake": (409,),
    "/metrics": (403,),
    "/stats": (403,),
    "/v1/models/{name}": (404,),
    "/v1/responses/{response_id}": (400, 404),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_PLAIN = ("/metrics",)


class ErrorDetail(msgspec.Struct):
    """What is wrong: ``param`` is the path of the field at fault, ``code`` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


def openapi_route(routes: Sequence[BaseRoute]) -> Route:
    """The route of the description of ``routes`` and of itself; files of a page are left out."""

    async def openapi(request: Request) -> Response:
        """``GET /openapi.json``: this description."""
        return Response(document, media_type="application/json")

    route = Route(PATH, openapi)
    document = msgspec.json.encode(describe([*routes, route]))
    return route


def describe(routes: Sequence[BaseRoute]) -> JsonObject:
    """The OpenAPI 3.1 document of ``routes``."""
    kinds = [*dict.fromkeys(BODIES.values()), ErrorAnswer]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: JsonObject = {}
    for route in routes:
        if isinstance(route, Route) and inspect.isfunction(route.endpoint):
            path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
            found = paths.setdefault(path, {})
            for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
                found[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "qkv-engine", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(meaning) for status, meaning in ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, path: str, method: str) -> JsonObject:
    kind = BODIES.get(path) if method == "POST" else None
    statuses = {*_OF_ALL, *(() if kind is None else _OF_BODIES), *_OF_PATHS.get(path, ())}
    answers: JsonObject = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}
    operation: JsonObject = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": _summary(route.endpoint),
        "responses": {"200": {"description": "the answer", "content": _contents(path)}} | answers,
    }
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if kind is not None:
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _contents(path: str) -> JsonObject:
    if path in _PLAIN:
        return {"text/plain": {"schema": {"type": "string"}}}
    found: JsonObject = {"application/json": {"schema": {"type": "object"}}}
    return found | ({"text/event-stream": {"schema": {"type": "string"}}} if path in _STREAMED else {})


def _error(meaning: str) -> JsonObject:
    schema = {"$ref": "#/components/schemas/ErrorAnswer"}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}


def _summary(endpoint: Any) -> str:
    """The first line of a docstring, without Markdown and what the path says already."""
    line = (inspect.getdoc(endpoint) or "").partition("\n")[0].rstrip(".")
    return line.partition(": ")[2].replace("``", "") or line.replace("``", "")
