"""Calls into libraries in Rust, whose panics derive from BaseException and must not end a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import QKVError

P = ParamSpec("P")
T = TypeVar("T")


def contain(
    error_type: Callable[[str], QKVError], message: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """``call(*args, **kwargs)``; any failure in it but an interrupt becomes an ``error_type``."""
    try:
        return call(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise error_type(f"{message}: {error}") from error
