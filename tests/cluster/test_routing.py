"""Parts that need no cluster: keys of routing, the policy of scaling, one page of metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from qkv_engine.cluster.metrics import merged
from qkv_engine.cluster.routing import routing_key
from qkv_engine.cluster.scaling import wanted_replicas


def key_of(authorization: str = "", **body: object) -> str:
    return routing_key(json.dumps(body).encode(), authorization)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Yes."}


def test_the_turns_of_a_conversation_have_one_key():
    first = key_of(messages=[SYSTEM, user("Is it so?")])
    assert first
    assert key_of(messages=[SYSTEM, user("Is it so?"), ANSWER, user("Why?")], temperature=1) == first
    assert key_of(messages=[SYSTEM, user("Is it not?")]) != first


def test_prompts_that_begin_alike_have_one_key():
    long = "x" * 5000
    assert key_of(prompt=long + "a") == key_of(prompt=long + "b") == key_of(prompt=[long + "c", "d"])
    assert key_of(prompt=[1, 2, 3]) == key_of(prompt=[[1, 2, 3], [4]]) != key_of(prompt=[1, 2, 4])


def test_responses_and_messages_have_keys_like_chats():
    long = "x" * 5000
    assert key_of(input=long + "a", instructions="A") == key_of(input=long + "b", instructions="A")
    assert key_of(input=long, instructions="A") != key_of(input=long, instructions="B")
    assert key_of(input=[user("So?"), ANSWER]) == key_of(input=[user("So?")]) != key_of(input=[user("No?")])
    assert key_of(messages=[user("So?")], system="A") == key_of(messages=[user("So?"), ANSWER], system="A")
    assert key_of(messages=[user("So?")], system=[{"type": "text", "text": "B"}]) != key_of(messages=[user("So?")])


def test_a_client_can_name_the_key():
    assert key_of(prompt="a", prompt_cache_key="mine") == key_of(prompt="b", prompt_cache_key="mine")


def test_callers_have_keys_of_their_own():
    assert key_of("Bearer one", prompt="a") != key_of("Bearer two", prompt="a")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"prompt": 3}', b'{"messages": "x"}', b"[" * 100_000, b'{"prompt": ""}']
)
def test_bodies_without_a_prompt_have_no_key(body: bytes):
    assert routing_key(body, "") == ""


def load(loads: list[float], *, queued: float = 0.0, number: int | None = None) -> SimpleNamespace:
    metrics = {"load": dict(enumerate(loads)), "seats": dict.fromkeys(range(len(loads)), 256.0)}
    number = number or len(loads)
    numbers = {"current_num_replicas": number, "target_num_replicas": number}
    return SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, **numbers)


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        (load([0.75, 0.75]), 2),
        (load([1.0, 1.0, 1.0]), 4),
        (load([3.0]), 4),  # requests wait in the engine
        (load([1.0], queued=512), 4),  # and in front of it
        (load([0.1, 0.1, 0.1, 0.1]), 1),
        (load([0.0]), 1),
        (load([1.0], number=4), 6),  # three have not reported: they are taken to be as full
    ],
)
def test_replicas_follow_the_load(context: SimpleNamespace, wanted: int):
    assert wanted_replicas(context) == (wanted, {})


def test_replicas_stay_until_one_has_reported():
    context = SimpleNamespace(aggregated_metrics={}, target_num_replicas=3)
    assert wanted_replicas(context) == (3, {})


def test_pages_of_metrics_become_one():
    page = '# HELP qkv:a_total words\n# TYPE qkv:a_total counter\nqkv:a_total{{model_name="m"}} {}\n'
    text = merged({"r1": page.format(1), "r2": page.format(2)}).decode()
    assert text.count("# TYPE") == 1
    assert 'qkv:a_total{model_name="m",replica="r1"} 1.0' in text
    assert 'qkv:a_total{model_name="m",replica="r2"} 2.0' in text
