"""A broken invariant."""

from __future__ import annotations


class Broken(BaseException):
    """A broken invariant. No ``Exception``: the core takes those for the failure of one request."""


def require(truth: bool, message: str) -> None:
    if not truth:
        raise Broken(message)
