"""The ASGI application: routes, and the gate that every request passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from uuid import uuid4

from anyio import to_thread
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv_engine import Engine, __version__
from qkv_engine.text.tokenizer import Tokenizer

from .access_log import log_answer
from .admin import admin_routes
from .answers import ChatAnswer, CompletionAnswer
from .bodies import ChatBody, CompletionBody, DetokenizeBody, JsonObject, TokenizeBody, read_body
from .dialects.messages import messages_routes
from .dialects.response_store import ResponseStore
from .dialects.responses import responses_routes
from .elsewhere import path_error
from .errors import ApiError, ClientGoneError, as_api_error, error_response
from .events import ChunkWriter
from .frontend import Frontend
from .generate import GenerationRequest, frontend_of, generate, json_response
from .hosts import Hosts
from .keys import Keys, authorization_of
from .limits import Limits
from .model_card import model_card
from .openapi import openapi_route
from .page import page_routes
from .sessions import session_routes
from .tools.choice import ToolUse
from .tools.history import for_template

LIVE, READY = ("/health", "/live"), ("/ready", "/ping")  # probes: of the process, and of who may be sent requests
MAX_ID_CHARS = 128  # of a client's own name for its request
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_GONE = 499  # nginx's status for it, in the log alone


def make_app(
    engine: Engine,
    names: Sequence[str],
    *,
    limits: Limits | None = None,
    keys: Keys | None = None,
    allow_origins: Sequence[str] = (),
    allow_hosts: Sequence[str] = (),
    page: bool = True,
    examples: Sequence[str] = (),
    admin_key: str | None = None,
) -> Starlette:
    """The application over ``engine``, which it does not close, for a model that clients call by ``names``.

    ``allow_origins`` are sites whose pages may call it from a browser. ``allow_hosts`` are the server's names beside
    "localhost" and IP addresses; with keys any name will do. ``page`` adds the chat at ``/``,
    which offers ``examples`` of questions that suit the model.
    ``admin_key`` is asked of who changes the engine; without one nobody can.
    """
    keys = Keys() if keys is None else keys
    limits = Limits() if limits is None else limits
    frontend = Frontend(engine, names, limits, num_tenants=keys.num_tenants, examples=examples)
    pages, hosts = page_routes() if page else [], Hosts(allow_hosts)
    responses = responses_routes(ResponseStore(frontend.limits.response_memory))
    dialects = [*responses, *messages_routes(), *session_routes()]
    guarded = admin_routes(admin_key)  # by a key of their own
    routes = [*_ROUTES, *dialects, *guarded]
    routes = [*routes, openapi_route(routes), *pages]
    open_paths = {*LIVE, *READY, *(route.path for route in (*pages, *guarded))}
    middleware = [Middleware(Gate, frontend=frontend, keys=keys, hosts=hosts, open_paths=open_paths)]
    if allow_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)  # first: a browser asks without a key whether it may send one
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _refuse})
    app.state.frontend = frontend
    return app


class Gate:
    """Checks the key of every request, names it in ``x-request-id``, and puts every error into its dialect's shape.

    A name that the client gives in that header is kept. Once the server stops, all but ``LIVE`` is refused.
    ``open_paths`` need no key. Without keys the name is checked by which the server was called.
    """

    def __init__(self, app: ASGIApp, *, frontend: Frontend, keys: Keys, hosts: Hosts, open_paths: Collection[str]):
        self._app, self._frontend = app, frontend
        self._keys, self._hosts, self._open_paths = keys, hosts, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        request.state.own_id = uuid4().hex
        request.state.id = _client_id(request) or request.state.own_id
        began_at, status = time.monotonic(), 0  # of the answer, once it has begun

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request.state.id.encode())]
                self._frontend.metrics.note_response(message["status"])
            await send(message)

        try:
            self._admit(request)
            await self._app(scope, receive, send_named)
        except ClientGoneError:
            await Response(status_code=CLIENT_GONE)(scope, receive, send_named)
        except (Exception, asyncio.CancelledError) as error:
            if status:
                raise
            await error_response(as_api_error(error, request.state.id), scope)(scope, receive, send_named)
        finally:
            log_answer(scope, status, began_at, request.state.id)

    def _admit(self, request: Request) -> None:
        if self._frontend.is_stopping and request.scope["path"] not in LIVE:
            message, headers = "the server is stopping", {"connection": "close"}
            raise ApiError(503, message, code="server_stopping", headers=headers)
        if not self._keys:
            self._hosts.check(request.headers.get("host"))
        tenant = self._keys.tenant_of(authorization_of(request.headers))
        if tenant is None and request.scope["path"] not in self._open_paths:
            headers = {"www-authenticate": "Bearer"}
            message = "send a key of this server as a bearer token, or in x-api-key"
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        request.state.tenant, request.state.is_operator = tenant, self._keys.is_operator(tenant)


def _client_id(request: Request) -> str | None:
    """The client's name for its request, if it is short and printable ASCII. Two requests may have the same."""
    name = request.headers.get("x-request-id", "")
    return name if 0 < len(name) <= MAX_ID_CHARS and name.isascii() and name.isprintable() else None


async def chat_completions(request: Request) -> Response:
    """``POST /v1/chat/completions``: the answer to a conversation."""
    frontend = frontend_of(request)
    body, load = await read_body(request, ChatBody, frontend)
    answer_id = f"chatcmpl-{request.state.own_id}"
    tools = ToolUse(body, frontend.engine.tokenizer)
    answer = ChatAnswer(body, answer_id, frontend.name, frontend.engine.tokenizer, tools)
    writer = ChunkWriter(answer, with_usage=body.includes_usage)

    def prompts() -> list[list[JsonObject]]:
        return [for_template(body.messages, frontend.threads)]

    kwargs = body.template_kwargs()
    names = body.renamed()
    work = GenerationRequest(body, load, answer, writer, answer_id, names, prompts, template_kwargs=kwargs, tools=tools)
    return await generate(request, work)


async def completions(request: Request) -> Response:
    """``POST /v1/completions``: texts that go on from prompts."""
    frontend = frontend_of(request)
    body, load = await read_body(request, CompletionBody, frontend)
    answer_id = f"cmpl-{request.state.own_id}"
    answer = CompletionAnswer(body, answer_id, frontend.name, frontend.engine.tokenizer)
    writer = ChunkWriter(answer, with_usage=body.includes_usage)
    body.check_length(frontend.engine.max_model_len)
    work = GenerationRequest(body, load, answer, writer, answer_id, body.renamed(), body.prompts, body.num_prompts())
    return await generate(request, work)


async def models(request: Request) -> Response:
    """``GET /v1/models``: the model, once for each of its names."""
    frontend = frontend_of(request)
    return json_response({"object": "list", "data": [model_card(frontend, name) for name in frontend.names]})


async def model(request: Request) -> Response:
    """``GET /v1/models/NAME``: the model, if it has that name."""
    frontend = frontend_of(request)
    frontend.check_model(name := request.path_params["name"])
    return json_response(model_card(frontend, name))


async def tokenize(request: Request) -> Response:
    """``POST /tokenize``: token ids of a prompt or a conversation."""
    frontend = frontend_of(request)
    body, load = await read_body(request, TokenizeBody, frontend)
    frontend.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages", param="prompt")

    def encode(tokenizer: Tokenizer) -> list[int]:
        most = frontend.max_tokens
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, body.add_special_tokens, max_tokens=most)
        kwargs = dict(body.chat_template_kwargs or {}) | ({"tools": body.tools} if body.tools else {})
        messages = for_template(body.messages or [], frontend.threads)
        return tokenizer.chat_prompt(messages, kwargs, max_tokens=most)[1]

    ids = await frontend.with_tokenizer(load, encode)
    return json_response({"count": len(ids), "max_model_len": frontend.engine.max_model_len, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """``POST /detokenize``: the text of token ids."""
    frontend = frontend_of(request)
    body, load = await read_body(request, DetokenizeBody, frontend)
    frontend.check_model(body.model)
    if len(body.tokens) > frontend.max_tokens:
        raise ApiError(400, f"{len(body.tokens)} ids are more than {frontend.max_tokens}", param="tokens")
    size = frontend.engine.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
        raise ApiError(400, f"the model's ids are 0 to {size - 1}", param="tokens")
    text = await frontend.with_tokenizer(load, lambda known: known.decode(body.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """``GET /tokenizer_info``: special tokens and chat template, in vLLM's form."""
    frontend = frontend_of(request)
    return json_response({**frontend.tokenizer.info, "model_max_length": frontend.engine.max_model_len})


async def live(request: Request) -> Response:
    """``GET /live``: 200, or 503 once the engine has stopped."""
    frontend_of(request).engine.describe()  # raises then
    return Response()


async def ready(request: Request) -> Response:
    """``GET /ready``: 200, or 503 once the engine has stopped; the gate makes it 503 while the server stops."""
    frontend_of(request).engine.describe()  # raises then
    return Response()


async def version(request: Request) -> Response:
    """``GET /version``: the version of this package."""
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    """``GET /metrics``: figures for Prometheus."""
    _check_operator(request)
    return Response(await frontend_of(request).render_metrics(), headers={"content-type": METRICS_TYPE})


async def stats(request: Request) -> Response:
    """``GET /stats``: ``EngineStats`` as JSON, under the model's name for clients."""
    _check_operator(request)
    frontend = frontend_of(request)
    found = await to_thread.run_sync(frontend.engine.stats)  # waits for the engine between two steps
    return json_response(replace(found, model=frontend.name))


def _check_operator(request: Request) -> None:
    """Raises ``ApiError`` for a tenant beside others: the figures are those of all, and tell what the others do."""
    if not request.state.is_operator:
        message = "figures of all tenants are for the first key of this server alone"
        raise ApiError(403, message, code="operator_only")


async def _refuse(request: Request, error: Exception) -> Response:
    """The error of a path that is not there, or has other methods."""
    assert isinstance(error, HTTPException)
    found = path_error(error.status_code, error.detail, request.method, request.scope["path"], error.headers)
    return error_response(found, request.scope)


_ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
    *(Route(path, live) for path in LIVE),
    *(Route(path, ready) for path in READY),
    Route("/version", version),
    Route("/metrics", metrics),
    Route("/stats", stats),
]
