"""Hints: retained prefixes outlive others, those of sessions that are done go first; requests are served as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from qkv_engine import Engine, RequestError, SamplingParams
from qkv_engine.kv.hints import DONE, PLAIN, RETAINED, Hints
from qkv_engine.sizes import parse_seconds

from ..small_demo import BLOCK_NBYTES, small_demo
from .test_mixed_precision import long_prompts

LENGTH = 300  # tokens of a prompt, two full blocks
CACHED = 256
PROMPTS = [long_prompts(1, LENGTH, seed=seed)[0] for seed in range(8)]


def ask(engine: Engine, number: int, **options: object) -> int:
    """The tokens of a prompt that were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, **options)  # type: ignore[arg-type]
    return engine.generate([PROMPTS[number]], params)[0].num_cached_tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Memory for the blocks of four prompts, of which none steps down."""
    with Engine(small_demo(), kv="bf16", kv_memory=9 * BLOCK_NBYTES, max_model_len=512, num_threads=1) as engine:
        yield engine


def test_what_is_retained_outlives_what_came_later(engine: Engine):
    ask(engine, 0, retain="10min")
    for number in range(1, 7):
        ask(engine, number)
    assert ask(engine, 0) == CACHED and ask(engine, 1) == 0


def test_no_time_retains_nothing(engine: Engine):
    ask(engine, 0, retain=0)
    for number in range(1, 7):
        ask(engine, number)
    assert ask(engine, 0) == 0


def test_what_is_done_goes_first(engine: Engine):
    ask(engine, 0)
    ask(engine, 1, session="one", retain="1h")
    ask(engine, 2)
    assert engine.done("one") == 2 and engine.done("one") == engine.done("two") == 0
    ask(engine, 3)
    ask(engine, 4)
    assert ask(engine, 0) == CACHED and ask(engine, 1) == 0


def test_a_tenant_ends_no_session_of_another(engine: Engine):
    ask(engine, 0, session="one", tenant="a")
    assert engine.done("one", tenant="b") == 0 and engine.done("one", tenant="a") == 2


def test_retained_prefixes_yield_to_requests(engine: Engine):
    for number in range(4):
        ask(engine, number, retain="10min")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = engine.generate([prompt + [1] * 200 for prompt in PROMPTS[4:]], params)
    assert all(output.finish_reason == "length" for output in outputs) and engine.stats().num_preemptions == 0


@pytest.mark.parametrize("retain", ["soon", -1, "31d", float("nan"), [1]])
def test_a_wrong_time_is_named(engine: Engine, retain: object):
    with pytest.raises(RequestError, match="not a time") as raised:
        ask(engine, 0, retain=retain)
    assert raised.value.field == "retain"


@pytest.mark.parametrize(
    ("value", "seconds"), [("90", 90), ("90s", 90), ("10min", 600), ("1.5 h", 5400), ("7D", 604_800), (2.5, 2.5)]
)
def test_times_in_words(value: object, seconds: float):
    assert parse_seconds(value) == seconds


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def hints_at(clock: list[float], most: int = 100, tenant: int = 100) -> tuple[Hints, Callable[[str], int]]:
    hints = Hints(most, tenant, lambda: clock[0])
    return hints, lambda name: hints.rank(name.encode())


def test_the_longest_life_counts_and_ends(clock: list[float]):
    hints, rank = hints_at(clock)
    hints.note(keys("a", "b"), 10, "", "", 5.0)
    hints.note(keys("a"), 10, "", "", 9.0)
    hints.note(keys("a"), 10, "", "", 2.0)
    clock[0] = 5.0
    assert hints.expire() == keys("b") and (rank("a"), rank("b")) == (RETAINED, PLAIN)
    clock[0] = 9.0
    assert hints.expire() == keys("a") and hints.retained_nbytes == 0


def test_beginnings_are_retained_as_far_as_bytes_go(clock: list[float]):
    hints, rank = hints_at(clock, most=30, tenant=20)
    hints.note(keys("a", "b", "c"), 10, "x", "", 5.0)
    hints.note(keys("d", "e"), 10, "y", "", 5.0)
    assert [rank(name) for name in "abcde"] == [RETAINED, RETAINED, PLAIN, RETAINED, PLAIN]


def test_a_session_ends_without_what_others_have(clock: list[float]):
    hints, rank = hints_at(clock)
    hints.note(keys("a", "b"), 10, "", "one", 5.0)
    hints.note(keys("a", "c"), 10, "", "two", None)
    assert hints.done("", "one") == keys("b") and (rank("a"), rank("b")) == (RETAINED, DONE)
    hints.used(b"b")
    assert rank("b") == PLAIN and hints.done("", "two") == keys("c", "a") and list(hints.done_keys()) == keys("c", "a")
