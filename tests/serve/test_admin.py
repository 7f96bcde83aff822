"""``/admin``: who may change the engine, and what they may ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkv_engine import Engine
from qkv_engine.cli import serve as command
from qkv_engine.errors import ConfigError
from qkv_engine.serve.keys import Keys

from .running import Running, running

KEY, ALICE = "admin-key-1234", "alice-key-1234"
MIB = 2**20


@pytest.fixture(scope="module")
def admin() -> Iterator[Running]:
    with Engine(kv_memory=32 * MIB) as engine, running(engine, keys=Keys([("alice", ALICE)]), admin_key=KEY) as found:
        yield found


def ask(server: Running, body: object, key: str | None = KEY):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return server.http.post("/admin/resize", json=body, headers=headers)


def test_memory_shrinks_and_grows(admin: Running):
    small = ask(admin, {"size": "8MiB"})
    assert small.status_code == 200 and 7.9 * MIB < small.json()["kv_bytes_total"] <= 8 * MIB
    assert admin.engine.stats().kv_bytes_total == small.json()["kv_bytes_total"]
    assert ask(admin, {"size": 1.0, "timeout": 5}).json() == {"kv_bytes_total": 32 * MIB}


@pytest.mark.parametrize("key", [None, ALICE, KEY[:-1], KEY + "5"])
def test_nobody_else_changes_it(admin: Running, key: str | None):
    refused = ask(admin, {"size": "8MiB"}, key)
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_admin_key"
    assert admin.engine.stats().kv_bytes_total == 32 * MIB


def test_the_admin_key_is_no_tenant_s(admin: Running):
    assert admin.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 401


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"size": "1MiB"}, 409, "size"),
        ({"size": "33MiB"}, 409, "size"),
        ({"size": "much"}, 400, "size"),
        ({"size": "8MiB", "timeout": -1}, 400, "timeout"),
        ({"size": None}, 400, "size"),
        ({"size": "8MiB", "force": True}, 400, None),
        ([], 400, None),
    ],
)
def test_other_sizes_are_refused(admin: Running, body: object, status: int, field: str | None):
    refused = ask(admin, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)
    assert admin.engine.stats().kv_bytes_total == 32 * MIB


def test_without_a_key_there_is_no_such_path(demo_engine: Engine):
    with running(demo_engine) as server:
        assert ask(server, {"size": "8MiB"}).status_code == 404


def test_the_key_is_read_from_a_file(tmp_path: Path):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    (tmp_path / "key").write_text(f"# of the operator\n{KEY}\n")
    given = ["--admin-key-file", str(tmp_path / "key")]
    assert command._admin_key(parser.parse_args(given)) == KEY
    assert command._admin_key(parser.parse_args([])) is None
    with pytest.raises(ConfigError, match="replicas"):
        command._admin_key(parser.parse_args([*given, "--replicas", "2"]))
    with pytest.raises(ConfigError):
        command._admin_key(parser.parse_args(["--admin-key-file", str(tmp_path)]))


def test_the_engine_sleeps_and_wakes(admin: Running):
    def post(name: str, key: str = KEY):
        return admin.http.post(f"/admin/{name}", headers={"authorization": f"Bearer {key}"})

    assert post("sleep", ALICE).status_code == post("wake", ALICE).status_code == 401
    assert post("sleep").json() == {"is_asleep": True} and admin.engine.is_asleep
    assert admin.http.get("/health").status_code == 200
    assert ask(admin, {"size": "8MiB"}).status_code == 400
    figures = admin.http.get("/metrics", headers={"authorization": f"Bearer {ALICE}"})
    assert figures.status_code == 200 and "kv_capacity_bytes{" in figures.text
    assert post("wake").json() == {"is_asleep": False} and not admin.engine.is_asleep
    assert admin.engine.stats().kv_bytes_total == 32 * MIB
