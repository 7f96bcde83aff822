"""Registration of the family for as long as a test takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkv_engine.kernels.formats import FAMILIES

from . import SIGN


@contextmanager
def registered() -> Iterator[None]:
    FAMILIES.append(SIGN)
    try:
        yield
    finally:
        FAMILIES.remove(SIGN)
