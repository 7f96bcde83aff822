"""The page at ``/``: a chat with the model beside live figures, by the server's own interface."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing but these files and this server; no text becomes markup or a script, whatever a model writes.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file of the page, read once: ``index.html`` at ``/``, the others below ``/static``."""
    return [_route(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES]


def _route(path: Path) -> Route:
    url = "/" if path.name == "index.html" else f"/static/{path.name}"
    file = Response(path.read_bytes(), headers=_HEADERS, media_type=_TYPES[path.suffix])
    return Route(url, file, methods=["GET"])
