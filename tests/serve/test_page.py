"""The commands and the programs of docs/serving.md run, against the server that the page starts."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from qkv_engine.cli.demo_questions import QUESTIONS
from qkv_engine.serve.metrics import Metrics
from qkv_engine.serve.server import bind

from ..doc_pages import ROOT, Block, blocks
from .running import Running

PAGE = ROOT / "docs/serving.md"
PORT = "8000"


def run_here(language: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.language == language and block.not_run == "tests/serve runs it"]


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """The page's server on a free port, started by the page's command."""
    with bind("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
    ((program, *words),) = run_here("sh")[0].commands()
    assert program == "qkv-engine" and PORT in words
    command = [sys.executable, "-m", "qkv_engine", *(port if word == PORT else word for word in words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, contextlib.ExitStack() as ending:
        ending.callback(server.terminate)
        assert server.stderr is not None
        for line in server.stderr:
            if "serving demo on" in line:
                break
        yield port


def test_the_commands_run(port: str):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    clients = [block.code.replace(PORT, port) for block in run_here("sh")[1:]]
    printed = [subprocess.run(["bash", "-e", "-c", code], capture_output=True, text=True) for code in clients]
    assert [done.returncode for done in printed] == [0] * len(clients), printed
    assert '"content":"4042"' in printed[0].stdout and "data: [DONE]" in printed[0].stdout
    assert '"token_logprobs":[null,-' in printed[1].stdout
    assert 'qkv:kv_free_bytes{model_name="demo"}' in printed[2].stdout


@pytest.mark.slow
def test_the_programs_run(port: str):
    """Each prints what the comments at the ends of its lines say."""
    programs = run_here("python")
    assert len(programs) == 3
    for block in programs:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compile(block.code.replace(PORT, port), PAGE.name, "exec"), {})
        assert shown.getvalue().strip() == "\n".join(re.findall(r"# (.+)$", block.code, re.MULTILINE))


def test_the_demo_model_offers_questions_that_it_answers_right(port: str):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/", timeout=60) as client:
        (card,) = client.get("models").json()["data"]
        assert card["examples"] == list(QUESTIONS)
        bodies = [{"messages": [{"role": "user", "content": question}]} for question in card["examples"]]
        answers = [client.post("chat/completions", json=body).json()["choices"][0]["message"] for body in bodies]
    right = ["4042", "9 25 62 178 310 540", "0815", "Ann 23, Bob 10, Cid 29"]
    assert [answer["content"] for answer in answers] == right


def test_the_table_has_every_metric(server: Running):
    named = set(re.findall(r"`(qkv:\w+)`", Path(PAGE).read_text()))
    made = {family.name for family in Metrics(server.engine, "demo")._registry.collect()}
    assert named == made | {"qkv:kv_basis_miss"}  # which a spectral plan alone has
