"""Prompts for an engine with a KV store, and its answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from qkv_engine import Engine, RequestOutput, SamplingParams

from ...small_demo import BLOCK_NBYTES, small_demo

LENGTH = 700
PROMPTS = [[random.Random(seed).randrange(1000) for _ in range(LENGTH)] for seed in range(6)]
FULL = LENGTH // 128 * 128  # tokens of a prompt in full blocks


def make_engine(folder: str | Path, **options: Any) -> Engine:
    """Memory for one prompt or two, host memory for three, and a store for all; no precision is lost."""
    memory = {"kv_memory": 10 * BLOCK_NBYTES, "host_memory": 20 * BLOCK_NBYTES}
    chosen = {"model": small_demo(), "kv": "bf16", "kv_store": folder, "num_threads": 1}
    return Engine(**memory | chosen | options)


def ask(engine: Engine, number: int, **options: Any) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **options)
    return engine.generate([PROMPTS[number]], params)[0]


def answer(engine: Engine, number: int) -> list[int]:
    return ask(engine, number).outputs[0].token_ids
