"""Errors as OpenAI's API words them: a status, and ``{"error": {message, type, param, code}}``.

Paths of the Messages API have Anthropic's form: ``{"type": "error", "error": {type, message}, "request_id"}``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from qkv_engine import RequestOutput
from qkv_engine.errors import EngineDeadError, ModelError, RequestError, UnavailableError

logger = logging.getLogger("qkv_engine")

# Fields of every body by the engine's name for them.
_PARAMS = {"prompt_token_ids": "prompt", "template_kwargs": "chat_template_kwargs", "prompt_logprobs": "logprobs"}
TOO_LONG = "max_model_len"  # the engine's field for a prompt that leaves no room
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"  # paths of dialects with errors of their own
# Anthropic's words for statuses; 5xx that are not here are "api_error".
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refused request. ``param`` is the path of the field at fault, ``code`` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    def body(self) -> bytes:
        """The error as JSON, for a response or an event of a stream."""
        error = {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def in_messages(self, request_id: str | None) -> dict[str, Any]:
        """The error in Anthropic's form, which has no place for the field: the message begins with it."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        is_named = self.param is None or self.message.startswith(self.param)
        message = self.message if is_named else f"{self.param}: {self.message}"
        error = {"type": _MESSAGES_TYPES.get(self.status, kind), "message": message}
        return {"type": "error", "error": error, "request_id": request_id}


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


def as_api_error(error: Exception | asyncio.CancelledError, request_id: str) -> ApiError:
    """``error`` in OpenAI's shape; an unforeseen one is logged, and its response has nothing but the request's id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return refused(error, {})
    if isinstance(error, UnavailableError):
        logger.warning("a request was refused: %s", error)
        message = "the server has no process or file descriptor left for this request; send it again"
        return ApiError(503, message, code="unavailable", headers={"retry-after": "1"})
    if isinstance(error, ModelError):  # a template that the model lacks, or that does not compile
        return ApiError(400, str(error))
    if isinstance(error, asyncio.CancelledError):
        return ApiError(503, "the server is stopping", code="server_stopping")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped", code="engine_dead")
    return failed(request_id, error)


def refused(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """The error of an invalid request. ``names`` are fields of its body by the engine's name for them."""
    if error.field == TOO_LONG:  # an option of the server, which its clients cannot change
        return ApiError(400, error.message, param=names.get(TOO_LONG), code="context_length_exceeded")
    field = error.field or ""
    param = {**_PARAMS, **names}.get(field) or names.get(re.split(r"[.\[]", field)[0]) or error.field
    return ApiError(400, str(error.renamed(param)), param=param)


def ended(output: RequestOutput, request_id: str, names: Mapping[str, str]) -> ApiError:
    """The error of a request that ended with one: its own, such as a grammar beyond limits, or the server's."""
    if output.error_field is None or output.error is None:
        return failed(request_id, output.error or "")
    text = output.error.removeprefix(f"{output.error_field}: ")
    return refused(RequestError(text, field=output.error_field), names)


def failed(request_id: str, cause: Exception | str) -> ApiError:
    """The error of a request that broke off. Logs the cause, which clients do not see."""
    logger.error("request %s failed: %s", request_id, cause, exc_info=cause if isinstance(cause, Exception) else None)
    return ApiError(500, f"the request failed; the server's log has the cause under {request_id}")


def error_response(error: ApiError, scope: Scope) -> Response:
    """The response that carries ``error``, in the form of the dialect whose path ``scope`` has."""
    body = error.body()
    if _is_below(MESSAGES, scope):
        body = msgspec.json.encode(error.in_messages(scope.get("state", {}).get("id")))
    return Response(body, error.status, error.headers, "application/json")


def last_events(error: ApiError, scope: Scope) -> bytes:
    """The end of a stream that broke off, of which nothing is known but its request's ``scope``."""
    if _is_below(MESSAGES, scope):
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error.in_messages(None))
    if _is_below(RESPONSES, scope):
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
    return b"data: %b\n\ndata: [DONE]\n\n" % error.body()


def _is_below(path: str, scope: Scope) -> bool:
    return f"{scope['path']}/".startswith(f"{path}/")


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
