"""The client of examples/ against a server."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from qkv_engine import Engine

from .running import running

PROGRAM = Path(__file__).resolve().parents[2] / "examples/openai_client.py"


def test_openai_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(kv_memory="64MiB") as engine, running(engine) as server:
        monkeypatch.setattr(sys, "argv", [PROGRAM.name, server.url])
        runpy.run_path(str(PROGRAM), run_name="__main__")
    first, second, *form = capsys.readouterr().out.splitlines()
    assert (first, second) == ("4042", "fewest bits of its KV: 16.0")
    assert isinstance(json.loads("".join(form))["answer"], int)
