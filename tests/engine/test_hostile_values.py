"""Whatever a caller passes: a typed error or an answer, and a running request beside it that notices nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qkv_engine import Engine, QKVError, SamplingParams

VICTIM = [5, 6, 7, 8]
LENGTH = 30  # tokens: more steps than the hostile calls of a test take
SHORT = {"temperature": 0.0, "max_tokens": 2}


class NoHash:
    __hash__ = None  # type: ignore[assignment]


class Hostile:
    """Fails at whatever is asked of it."""

    def _fail(self, *args: object) -> Any:
        raise ZeroDivisionError("hostile")

    __repr__ = __str__ = __hash__ = __eq__ = __len__ = __iter__ = __getitem__ = __bool__ = __int__ = __index__ = _fail
    __float__ = __lt__ = __gt__ = __contains__ = _fail


class HostileStr(str):
    __hash__ = __eq__ = __len__ = __repr__ = __str__ = __iter__ = Hostile._fail  # type: ignore[assignment]


class HostileInt(int):
    __hash__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = __int__ = Hostile._fail  # type: ignore[assignment]


class HostileFloat(float):
    __hash__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = __float__ = Hostile._fail  # type: ignore[assignment]


class HostileList(list):  # type: ignore[type-arg]
    __len__ = __iter__ = __repr__ = __getitem__ = __contains__ = Hostile._fail  # type: ignore[assignment]


class HostileDict(dict):  # type: ignore[type-arg]
    __len__ = __iter__ = __repr__ = __getitem__ = keys = items = values = get = Hostile._fail  # type: ignore[assignment]


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@functools.cache
def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "list": lambda: [],
    "dict": lambda: {},
    "set": lambda: {1},
    "bytes": lambda: b"x",
    "object": object,
    "unhashable": NoHash,
    "hostile": Hostile,
    "hostile str": lambda: HostileStr("x"),
    "hostile int": lambda: HostileInt(1),
    "hostile float": lambda: HostileFloat(0.5),
    "hostile list": lambda: HostileList([1]),
    "hostile dict": lambda: HostileDict({1: 2}),
    "huge int": lambda: 10**5000,
    "negative": lambda: -1,
    "bool": lambda: True,
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "complex": lambda: 1j,
    "long text": lambda: "x" * 100_000,
    "lines": lambda: "a\nb",
    "surrogate": lambda: "\ud800",
    "cyclic": cyclic,
    "deep": deep,
    "list of lists": lambda: [[1], [2]],
    "list of huge": lambda: [2**70],
    "generator": lambda: (i for i in (1, 2)),
    "class": lambda: int,
}


@pytest.fixture(scope="module")
def victim(small_engine: Engine) -> Iterator[Callable[[], None]]:
    """Begins a request; the function given checks that it ended as it does alone."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    alone = small_engine.generate([VICTIM], params)[0].token_ids
    running = small_engine.stream(VICTIM, params)

    def check() -> None:
        nonlocal running
        *_, last = running
        assert last.finish_reason == "length" and last.token_ids == alone
        running = small_engine.stream(VICTIM, params)

    yield check
    running.close()


def outcome(call: Callable[[], object]) -> str:
    """How a call with a hostile value ends: "refused" by a typed error of one line, or "answered"."""
    try:
        call()
    except QKVError as error:
        text = str(error)
        assert "\n" not in text and len(text) < 1000, text
        return "refused"
    return "answered"


def read(engine: Engine, *args: Any, **kwargs: Any) -> None:
    with engine.stream(*args, **kwargs) as stream:
        next(stream)


def nearly_full(engine: Engine) -> list[int]:
    """A prompt that leaves an answer without a limit two tokens."""
    return [8] * (engine.max_model_len - 2)


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_a_parameter_of_any_value(small_engine: Engine, victim: Callable[[], None], field: str):
    found = {
        name: outcome(lambda make=make: read(small_engine, [9], SamplingParams(**{**SHORT, field: make()})))
        for name, make in VALUES.items()
    }
    assert {found[name] for name in ("object", "hostile", "complex", "generator", "deep")} == {"refused"}, found
    victim()


CALLS: dict[str, Callable[[Engine, Any], object]] = {
    "abort": lambda engine, value: engine.abort(value),
    "stream(prompt)": lambda engine, value: read(engine, value, SamplingParams(**SHORT)),
    "stream(params)": lambda engine, value: read(engine, [9], value),
    "stream(request_id)": lambda engine, value: read(engine, [9], SamplingParams(**SHORT), request_id=value),
    "stream(template_kwargs)": lambda engine, value: read(
        engine, [{"role": "user", "content": "hi"}], SamplingParams(**SHORT), template_kwargs=value
    ),
    "generate(prompts)": lambda engine, value: engine.generate(value, SamplingParams(**SHORT)),
    "generate([prompt])": lambda engine, value: engine.generate([[9], value], SamplingParams(**SHORT)),
    "generate({prompt})": lambda engine, value: engine.generate({"prompt": value}, SamplingParams(**SHORT)),
    "generate([params])": lambda engine, value: engine.generate(
        [[9], nearly_full(engine)], [SamplingParams(**SHORT), value]
    ),
    "generate(request_id)": lambda engine, value: engine.generate([[9]], SamplingParams(**SHORT), request_id=value),
    "chat(messages)": lambda engine, value: engine.chat(value, SamplingParams(**SHORT)),
    "chat([message])": lambda engine, value: engine.chat([value], SamplingParams(**SHORT)),
    "chat(role)": lambda engine, value: engine.chat([{"role": value, "content": "hi"}], SamplingParams(**SHORT)),
    "chat(content)": lambda engine, value: engine.chat([{"role": "user", "content": value}], SamplingParams(**SHORT)),
    "chat(more)": lambda engine, value: engine.chat(
        [{"role": "user", "content": "hi", "more": value}], SamplingParams(**SHORT)
    ),
    "chat({variable})": lambda engine, value: engine.chat("hi", SamplingParams(**SHORT), template_kwargs={"x": value}),
    "params": lambda engine, value: engine.params(kv_floor=value),
    "params(unknown)": lambda engine, value: engine.params(unknown=value),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_any_value(small_engine: Engine, victim: Callable[[], None], call: str):
    found = {name: outcome(lambda make=make: CALLS[call](small_engine, make())) for name, make in VALUES.items()}
    assert "refused" in found.values(), found
    victim()


def test_there_are_many_cases():
    assert len(VALUES) * (len(CALLS) + len(SamplingParams.__struct_fields__)) >= 1000
