"""The operator's requests that change the engine: for the holder of the admin key, which is no tenant's."""

from __future__ import annotations

from functools import partial

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qkv_engine.errors import CapacityError, ConfigError, ModelError

from .bodies import decode, read_bytes
from .errors import ApiError
from .frontend import Frontend
from .keys import Keys

RESIZE_SECONDS = 30.0  # after which an answer comes while a shrink goes on


class ResizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """``size`` as ``Engine.resize`` takes it, and the seconds after which to answer."""

    size: int | str | float
    timeout: float = RESIZE_SECONDS


def admin_routes(key: str | None) -> list[Route]:
    """The routes for the holder of ``key``; none without one. Raises ``ConfigError`` for a text that is no key."""
    if key is None:
        return []
    keys = Keys([("admin", key)])

    def allowed(request: Request) -> Frontend:
        """The front end, for the holder of the key. Raises ``ApiError`` for others."""
        if keys.tenant_of(request.headers.get("authorization")) is None:
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "send the admin key as a bearer token", code="invalid_admin_key", headers=headers)
        frontend: Frontend = request.app.state.frontend
        return frontend

    async def resize(request: Request) -> Response:
        """``POST /admin/resize``: another size of KV memory; answers with the bytes held."""
        frontend = allowed(request)
        body = decode(await read_bytes(request, frontend.limits), ResizeBody)
        seconds = min(body.timeout, frontend.limits.request_timeout)
        try:
            held = await to_thread.run_sync(partial(frontend.engine.resize, body.size, timeout=seconds))
        except CapacityError as error:
            raise ApiError(409, str(error), param="size", code="capacity") from error
        except ConfigError as error:
            raise ApiError(400, str(error), param=error.field) from error
        return _json({"kv_bytes_total": held})

    async def sleep(request: Request) -> Response:
        """``POST /admin/sleep``: gives the device back; answers whether the engine sleeps."""
        frontend = allowed(request)
        try:
            seconds = frontend.limits.request_timeout
            return _json({"is_asleep": await to_thread.run_sync(partial(frontend.engine.sleep, timeout=seconds))})
        except ConfigError as error:
            raise ApiError(400, str(error), param=error.field) from error

    async def wake(request: Request) -> Response:
        """``POST /admin/wake``: loads the model again; answers once requests go on."""
        frontend = allowed(request)
        try:
            await to_thread.run_sync(frontend.engine.wake)
        except (CapacityError, ModelError) as error:
            raise ApiError(409, str(error), code="capacity" if isinstance(error, CapacityError) else "model") from error
        return _json({"is_asleep": False})

    found = {"resize": resize, "sleep": sleep, "wake": wake}
    return [Route(f"/admin/{name}", endpoint, methods=["POST"]) for name, endpoint in found.items()]


def _json(fields: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(fields), media_type="application/json")
