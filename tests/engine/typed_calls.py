"""Calls of the engine as mypy sees them; checked by ``make lint``, never run."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from qkv_engine import Engine, RequestOutput, SamplingParams


class Message(TypedDict):
    role: str
    content: str


def calls(messages: list[Message], ids: list[int]) -> None:
    engine = Engine(Path("model"), kv_memory="1GiB", num_threads=2)
    one: RequestOutput = engine.chat(messages)
    two: RequestOutput = engine.chat("hi", SamplingParams(), request_id="a")
    many: list[RequestOutput] = engine.chat([messages, messages])
    more: list[RequestOutput] = engine.generate(ids) + engine.generate([ids, ids]) + engine.generate(["a", "b"])
    with engine.stream(messages, engine.params(kv_floor="int8")) as stream:
        text: str = next(stream).delta
    print(one, two, many, more, text)
