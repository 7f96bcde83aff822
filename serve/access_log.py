"""The access log: a line for each answered request, without anything that clients wrote but path and name."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.types import Scope

logger = logging.getLogger("qkv_engine.access")

MAX_PATH_CHARS = 200


def log_answer(scope: Scope, status: int, began_at: float, request_id: str) -> None:
    """Logs an answer that has ended; ``began_at`` is in seconds of ``time.monotonic()``.

    The path is as it was sent, so in printable ASCII, without its query. The record has the parts as ``fields``, too.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("ascii", "replace")
    fields = {
        "client": (scope.get("client") or ("-",))[0],
        "method": scope["method"],
        "path": path[:MAX_PATH_CHARS],
        "status": status,
        "ms": round((time.monotonic() - began_at) * 1000, 1),
        "request_id": request_id,
    }
    line = '%(client)s "%(method)s %(path)s" %(status)d %(ms).1f ms %(request_id)s'
    logger.info(line, fields, extra={"fields": fields})
