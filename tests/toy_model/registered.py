"""Registration of the architecture for as long as a test takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkv_engine.models.llama import read_llama
from qkv_engine.models.registry import FAMILIES, ModelFamily

from .model import ParallelForCausalLM

NAME = "ParallelForCausalLM"


@contextmanager
def registered() -> Iterator[None]:
    FAMILIES[NAME] = ModelFamily("parallel", read_llama, ParallelForCausalLM)
    try:
        yield
    finally:
        del FAMILIES[NAME]
