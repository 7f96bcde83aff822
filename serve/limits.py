"""The limits of a server, in its users' units."""

from __future__ import annotations

from dataclasses import dataclass

from qkv_engine.errors import ConfigError

MAX_SECONDS = 86_400.0  # of a time-out: a day


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of clients' load and patience. Raises ``ConfigError`` for one out of range.

    Fields
        max_requests: completions running and waiting at once; more are refused with status 429.
        max_body: bytes of a request's body; more are refused with status 413.
        max_connections: open connections; more are closed at once.
        read_timeout: seconds in which a client must send its headers, then its body, or go on reading an answer.
        request_timeout: seconds in which a request must have ended; then it is aborted with status 504.
        drain_timeout: seconds that requests under way get to end after SIGTERM.
        response_memory: bytes of responses that are kept for ``previous_response_id``, 0 for none.
    """

    max_requests: int = 1024
    max_body: int = 8 << 20
    max_connections: int = 4096
    read_timeout: float = 20.0
    request_timeout: float = 3600.0
    drain_timeout: float = 30.0
    response_memory: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError("out of range", field=name, value=getattr(self, name), remedy="Give 1 or more")
        if self.response_memory < 0:
            raise ConfigError(
                "out of range", field="response_memory", value=self.response_memory, remedy="Give 0 or more"
            )
        for name in ("read_timeout", "request_timeout", "drain_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds <= MAX_SECONDS:  # nor nan
                remedy = f"Give seconds above 0, at most {MAX_SECONDS:,.0f}"
                raise ConfigError("out of range", field=name, value=seconds, remedy=remedy)
