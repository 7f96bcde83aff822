"""The programs of examples/ run, and docs/examples.md lists each of them."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import httpx
import pytest

from qkv_engine.cli.main import _parse, main
from qkv_engine.serve.limits import Limits

from .doc_pages import ROOT

FOLDER = ROOT / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_each_example_is_listed() -> None:
    page = (ROOT / "docs/examples.md").read_text()
    names = [path.name for path in FOLDER.iterdir() if path.is_file()]
    assert len(names) >= 8 and [name for name in names if f"`examples/{name}`" not in page] == []


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """Counters end in ``_total``, histograms in ``_bucket``, which docs/serving.md leaves out."""
    board = json.loads((FOLDER / "grafana.json").read_text())
    asked = {m for panel in board["panels"] for t in panel["targets"] for m in re.findall(r"qkv:(\w+)", t["expr"])}
    known = set(re.findall(r"`qkv:(\w+)`", (ROOT / "docs/serving.md").read_text()))
    assert len(asked) >= 15 and {re.sub("_(total|bucket)$", "", name) for name in asked} <= known
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) == len({p["id"] for p in board["panels"]})


def test_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "stream.py", "What is 47*86?")
    printed = capsys.readouterr().out
    assert printed.endswith("4042\n") and "\033[90m" in printed


@pytest.mark.slow
def test_precision(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "precision.py")
    free, floored, pinned, stepped = capsys.readouterr().out.splitlines()
    assert free.startswith("as far as it must") and "fewest bits 16" not in free
    assert "int4" not in floored
    assert pinned.endswith("fewest bits 16.0")
    assert not stepped.startswith("0 ")


@pytest.mark.slow
def test_plan_and_ladder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", "--task", "addition:10", "--samples", "1", "--budget", "3bits", "-o", str(plan)]) == 0
    capsys.readouterr()
    run(monkeypatch, "plan_file.py", plan)
    run(monkeypatch, "ladder.py")
    printed = capsys.readouterr().out
    assert "(plan" in printed and "(mine)" in printed and printed.endswith("4042\n")


def test_batch_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, target = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps({"id": n, "question": f"What is {n}+30?"}) + "\n" for n in (12, 13)))
    run(monkeypatch, "batch_file.py", source, target)
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        {"id": n, "question": f"What is {n}+30?", "answer": str(n + 30), "finish_reason": "stop"} for n in (12, 13)
    ]


async def _ask(*questions: str) -> list[httpx.Response]:
    app = runpy.run_path(str(FOLDER / "web_app.py"))["app"]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client,
    ):
        return [await client.get("/ask", params={"q": question}) for question in questions]


def test_web_app() -> None:
    right, refused = asyncio.run(_ask("What is 47*86?", "x " * 20_000))
    assert (right.status_code, right.text) == (200, "4042")
    assert refused.status_code == 400 and "max_model_len" in refused.json()["error"]


def test_service_starts_a_command_that_parses() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(FOLDER / "qkv-engine.service")
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "qkv-engine"
    _parse(words)
    assert int(unit["Service"]["TimeoutStopSec"]) > Limits().drain_timeout
