"""``POST /v1/sessions/done``: a tenant ends its own conversations early, and never another's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qkv_engine import Engine
from qkv_engine.serve.keys import Keys

from .running import Running, running

ALICE, BOB = "alice-key-1234", "bob-key-123456"
PROMPT = [[7] * 300]  # the demo model's sink and two blocks
PIECES = 3


@pytest.fixture
def tenants() -> Iterator[Running]:
    keys = Keys([("alice", ALICE), ("bob", BOB)])
    with Engine(kv_memory="32MiB", num_threads=1) as engine, running(engine, keys=keys) as found:
        yield found


def post(tenants: Running, path: str, key: str | None, **body: object):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return tenants.http.post(path, json=body, headers=headers)


def ask(tenants: Running, key: str, **fields: object) -> int:
    """Asks, and returns the tokens that were cached."""
    answer = post(tenants, "/v1/completions", key, prompt=PROMPT, max_tokens=1, **fields)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def end(tenants: Running, key: str | None, session: object = "ticket 7/a"):
    return post(tenants, "/v1/sessions/done", key, session=session)


@pytest.mark.parametrize("field", ["session", "prompt_cache_key"])
def test_a_tenant_ends_its_own_conversation_alone(tenants: Running, field: str):
    for key in (ALICE, BOB):
        ask(tenants, key, **{field: "ticket 7/a"})
    ended = end(tenants, ALICE)
    assert ended.status_code == 200
    assert ended.json() == {"object": "session", "session": "ticket 7/a", "num_pieces": PIECES}
    assert end(tenants, ALICE).json()["num_pieces"] == 0, "it was over"
    hints = tenants.engine._alive.core.space.prefix.hints
    assert list(hints._sessions) == [("bob", "ticket 7/a")] and len(hints._done) == PIECES
    assert end(tenants, BOB).json()["num_pieces"] == PIECES


@pytest.mark.parametrize("key", [None, ALICE[:-1]])
def test_nobody_ends_one_without_a_key(tenants: Running, key: str | None):
    ask(tenants, ALICE, session="ticket 7/a")
    assert end(tenants, key).status_code == 401
    assert end(tenants, ALICE).json()["num_pieces"] == PIECES


@pytest.mark.parametrize("session", ["", "a" * 2000, "a\nb", None, 7])
def test_what_is_no_name_is_refused(tenants: Running, session: object):
    refused = end(tenants, ALICE, session)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session")
