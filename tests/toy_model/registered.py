"""Registration of the architecture for as long as a test takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkv_engine.models.config import ARCHITECTURES
from qkv_engine.models.registry import MODELS

from .model import ParallelForCausalLM

NAME = "ParallelForCausalLM"


@contextmanager
def registered() -> Iterator[None]:
    ARCHITECTURES[NAME] = "parallel"
    MODELS[NAME] = ParallelForCausalLM
    try:
        yield
    finally:
        del ARCHITECTURES[NAME], MODELS[NAME]
