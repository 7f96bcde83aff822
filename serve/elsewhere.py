"""Paths of other servers that this one lacks, and what a client is told to call instead."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import ApiError

NOT_OFFERED, UNKNOWN = "not_offered", "unknown_url"  # ``code`` of an error
_TEXT = "use /v1/chat/completions or /v1/completions"
_STATELESS = "this server keeps no threads; send all messages to /v1/chat/completions"
_NO_FILES = "this server takes no files; send requests one by one to /v1/chat/completions, as many at once as you like"
# A path stands for those below it, too.
_INSTEAD = {
    "/v1/responses/compact": "this server compacts nothing; send fewer items to /v1/responses",
    "/v1/responses/input_tokens": "this server counts the tokens of a conversation at /tokenize",
    "/v1/complete": "use /v1/messages",
    **dict.fromkeys(
        ("/v1/embeddings", "/embeddings", "/embed", "/embedding", "/pooling", "/v1/pooling"),
        f"this server makes no embeddings; {_TEXT}",
    ),
    **dict.fromkeys(
        ("/v1/rerank", "/rerank", "/v2/rerank", "/reranking", "/v1/score", "/score", "/classify", "/v1/classify"),
        f"this server ranks no texts; {_TEXT}",
    ),
    "/v1/images": f"this server makes no images; {_TEXT}",
    "/v1/videos": f"this server makes no videos; {_TEXT}",
    "/v1/audio": f"this server neither hears nor speaks; {_TEXT}",
    "/v1/realtime": "this server has no Realtime API; use /v1/chat/completions with stream=true",
    "/v1/moderations": "this server judges no texts; ask the model by /v1/chat/completions",
    "/v1/files": _NO_FILES,
    "/v1/uploads": _NO_FILES,
    "/v1/batches": _NO_FILES,
    "/v1/messages/batches": "this server takes no batches; send the messages to /v1/messages, many at once",
    "/v1/vector_stores": _NO_FILES,
    "/v1/containers": _NO_FILES,
    "/v1/fine_tuning": "this server trains no models",
    "/v1/evals": "this server runs no evaluations; qkv-engine eval does",
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/conversations": "this server keeps no conversations; send previous_response_id to /v1/responses",
    "/v1/engines": "use /v1/models, and name the model in the body",
    "/v1/edits": "use /v1/chat/completions",
    "/v1/v1": "the base URL ends in /v1 once: http://HOST:PORT/v1",
    "/chat/completions": "use /v1/chat/completions: the base URL ends in /v1",
    "/completions": "use /v1/completions: the base URL ends in /v1",
    "/models": "use /v1/models: the base URL ends in /v1",
    **dict.fromkeys(("/generate", "/generate_stream", "/completion", "/infill", "/invocations"), "use /v1/completions"),
    **dict.fromkeys(("/livez", "/healthz"), "use /live, or /health"),
    "/readyz": "use /ready",
    **dict.fromkeys(("/docs", "/redoc"), "use /openapi.json, which describes all paths"),
    "/api": "this server has no API of Ollama; use /v1/chat/completions",
}


def path_error(status: int, detail: str, method: str, path: str, headers: Mapping[str, str] | None) -> ApiError:
    """The error of a path that is not here, or has other methods; ``detail`` is HTTP's word, such as "Not Found"."""
    instead = _instead(path)
    if instead is not None:
        return ApiError(status, instead, code=NOT_OFFERED, headers=headers)
    code = UNKNOWN if status == 404 else None
    return ApiError(status, f"{detail}: {method} {path[:80]}", code=code, headers=headers)


def _instead(path: str) -> str | None:
    """What to call in place of ``path``, by the longest known path that it begins with."""
    parts = path.rstrip("/").split("/")
    known = ("/".join(parts[:number]) for number in range(min(len(parts), 5), 1, -1))
    return next((_INSTEAD[name] for name in known if name in _INSTEAD), None)
