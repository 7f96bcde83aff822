"""Conversations by name: a client tells that one of its own is over."""

from __future__ import annotations

from functools import partial

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qkv_engine.errors import RequestError
from qkv_engine.validation import check_name

from .bodies import read_body
from .errors import refused
from .generate import frontend_of, json_response

PATH = "/v1/sessions/done"


class SessionBody(msgspec.Struct):
    """``session``: the name that its requests gave, in ``session`` or ``prompt_cache_key``."""

    session: str


async def done(request: Request) -> Response:
    """``POST /v1/sessions/done``: has what is cached of a conversation make room before all else."""
    frontend = frontend_of(request)
    body, load = await read_body(request, SessionBody, frontend)
    try:
        session = check_name("session", body.session, may_be_empty=False)
    except RequestError as error:
        raise refused(error, {}) from error
    number = await to_thread.run_sync(partial(frontend.engine.done, session, tenant=load.tenant))
    return json_response({"object": "session", "session": session, "num_pieces": number})


def session_routes() -> list[Route]:
    """The routes of conversations."""
    return [Route(PATH, done, methods=["POST"])]
