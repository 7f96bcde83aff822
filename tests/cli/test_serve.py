"""``qkv-engine serve`` as a program: its options, what it refuses, and its end by a signal."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from qkv_engine.cli.demo_questions import QUESTIONS
from qkv_engine.cli.log import configure_logging
from qkv_engine.cli.main import _parse, main
from qkv_engine.cli.serve import _keys, _log_to_stderr, _sites


@pytest.fixture(autouse=True)
def _offline() -> None:
    """The program under test listens on this machine."""


def test_it_serves_until_a_signal_and_then_drains(tmp_path: Path):
    key, program = "a-secret-key", [sys.executable, "-m", "qkv_engine", "serve", "--port", "0", "--verbose"]
    (tmp_path / "keys").write_text(f"me {key}\n")
    options = ["--api-key-file", str(tmp_path / "keys"), "--kv-memory", "64MiB", "--served-name", "mine"]
    with (
        subprocess.Popen([*program, *options], stderr=subprocess.PIPE, text=True, env=os.environ) as server,
        ExitStack() as ending,
    ):
        ending.callback(server.kill)
        assert server.stderr is not None
        lines = []
        while not lines or " on http://" not in lines[-1]:
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        url = re.search(r"serving mine on (\S+)", lines[-1])[1]
        body = json.dumps({"model": "mine", "messages": [{"role": "user", "content": "What is 47*86?"}]}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        with urlopen(Request(f"{url}/v1/chat/completions", body, headers), timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "4042"
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
        assert server.wait(30) == 143
    assert lines[0] == "qkv-engine: loading demo\n" and "KV" in "".join(lines)
    assert re.search(r"Z info: 127\.0\.0\.1 \"POST /v1/chat/completions\" 200 [\d.]+ ms \w{32}\n", rest)
    assert key not in "".join(lines) + rest


def test_a_json_log_has_an_object_a_line_to_the_end():
    words = ["--port", "0", "--kv-memory", "64MiB", "--log-format", "json", "--access-log"]
    program = [sys.executable, "-m", "qkv_engine", "serve", *words]
    with (
        subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=os.environ) as server,
        ExitStack() as ending,
    ):
        ending.callback(server.kill)
        assert server.stderr is not None
        records = [json.loads(server.stderr.readline())]
        while " on http://" not in records[-1]["message"]:
            records.append(json.loads(server.stderr.readline()))
        url = re.search(r"serving demo on (\S+)", records[-1]["message"])[1]
        asked = Request(f"{url}/v1/completions", b'{"prompt": "whispered"}', {"x-request-id": 'a "name"'})
        with urlopen(asked, timeout=60) as answer:
            assert answer.headers["x-request-id"] == 'a "name"'
        server.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in server.stderr]
        assert server.wait(30) == 143
    assert all({"time", "level", "logger", "message"} <= set(record) for record in records + rest)
    times = [datetime.fromisoformat(record["time"]) for record in records + rest]
    assert times == sorted(times) and all(time.utcoffset() == timedelta(0) for time in times)
    assert records[0]["message"] == "loading demo"
    (line,) = (record for record in rest if record["logger"] == "qkv_engine.access")
    assert (line["method"], line["path"], line["status"], line["request_id"]) == (
        "POST", "/v1/completions", 200, 'a "name"',
    )  # fmt: skip
    assert line["ms"] > 0 and "whispered" not in str(rest)


def test_without_the_option_no_request_is_logged():
    args = _parse(["serve"])
    configure_logging(args)
    _log_to_stderr(args)
    assert not logging.getLogger("qkv_engine.access").isEnabledFor(logging.INFO)
    assert args.log_format == "text"


def test_an_error_of_a_json_log_is_a_record(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--port", "70000", "--log-format", "json"]) == 2
    record = json.loads(capsys.readouterr().err)
    assert record["level"] == "error" and record["message"].startswith("--port=70000: no port")
    configure_logging(_parse(["env"]))  # as it is in a process of its own


def test_an_exception_of_a_json_log_stays_on_its_line(capsys: pytest.CaptureFixture[str]):
    configure_logging(_parse(["serve", "--log-format", "json"]))
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("qkv_engine").exception("c\nd\x1b[2J")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record["message"] == "c\nd\x1b[2J" and record["exception"].endswith("ValueError: a\nb")
    configure_logging(_parse(["env"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "others could call without a key. Give --api-key-file, or --no-api-key"),
        (["--api-key", "short"], "at least 8 printable"),
        (["--max-body", "many"], "--max-body='many': not a size"),
        (["--response-memory", "50%"], "--response-memory='50%': a share of memory that is not here"),
        (["--read-timeout", "0"], "--read-timeout=0.0: out of range"),
        (["--allow-origin", "ours.example"], "--allow-origin='ours.example': no site. Give it as browsers do"),
        (["--allow-origin", "https://ours.example/"], "no site"),
        (["--port", "70000"], "--port=70000: no port"),
        (["--shape", "huge"], "--shape='huge': unknown shape"),
        (["--max-num-seqs", "0", "--port", "0"], "--max-num-seqs=0: out of range"),
        (["--replicas", "2", "--access-log"], "--access-log: replicas have no access log"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(options: list[str], message: str, capsys):
    assert main(["serve", *options]) == 2
    assert message in capsys.readouterr().err


def test_keys_of_the_command_line_and_of_a_file_are_apart(tmp_path: Path):
    (tmp_path / "keys").write_text("a-key-of-the-file\n")
    args = _parse(["serve", "--api-key", "a-key-of-the-line", "--api-key-file", str(tmp_path / "keys")])
    tenants = {_keys(args).tenant_of(f"Bearer a-key-of-the-{place}") for place in ("line", "file")}
    assert len(tenants) == 2 and None not in tenants


def test_sites_are_those_that_the_options_name():
    words = ["serve", "--allow-host", "ours.example", "--allow-origin", "https://theirs.example"]
    sites = {"allow_origins": ["https://theirs.example"], "allow_hosts": ["127.0.0.1", "ours.example"], "page": True}
    assert _sites(_parse(words)) == {**sites, "examples": QUESTIONS}
    for model in (["a/folder"], ["--shape", "llama-3.1-8b"]):  # are no demo model
        assert _sites(_parse([*words, *model])) == {**sites, "examples": ()}
    assert not _sites(_parse(["serve", "--no-page"]))["page"]


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("qkv_engine.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["serve", "--port", "0"]) == 1
    assert "pip install '.[serve]'" in capsys.readouterr().err
