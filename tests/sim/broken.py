"""A broken invariant."""

from __future__ import annotations


class Broken(BaseException):
    """A broken invariant. No ``Exception``: the core takes those for the failure of one request."""


def require(truth: bool, message: str, *values: object) -> None:
    """Raises ``Broken`` unless ``truth``; each ``{}`` of ``message`` stands for one of ``values``."""
    if not truth:
        raise Broken(message.format(*values) if values else message)
