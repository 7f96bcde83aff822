"""``env``: versions, and capacities that agree with what the engine allocates."""

import json
import subprocess
import sys
from typing import Any

import pytest

from qkv_engine import Engine, __version__
from qkv_engine.cli import main


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["env", *words, "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_capacity_is_what_the_engine_says(capsys: pytest.CaptureFixture[str], demo_engine: Engine):
    found = facts(capsys, "--kv", "fp32", "--kv-memory", "256MiB")
    stats = demo_engine.stats()
    assert found["kv"]["memory_bytes"] == stats.kv_bytes_total
    assert found["kv"]["rungs"][0]["capacity_tokens"] == stats.kv_tokens_capacity
    assert found["kv"]["rungs"][0]["effective_bits"] == stats.effective_bits
    assert (found["model"]["name"], found["model"]["dtype"]) == (stats.model, stats.dtype)
    assert found["model"]["context_tokens"] == stats.max_model_len


def test_versions(capsys: pytest.CaptureFixture[str]):
    versions = facts(capsys)["versions"]
    assert versions["qkv-engine"] == __version__ and versions["python"] == sys.version.split()[0]
    assert versions["torch"][0].isdigit()


def test_a_shape_needs_no_weights(capsys: pytest.CaptureFixture[str]):
    found = facts(capsys, "llama-3.1-8b", "--kv-memory", "20GiB", "--dtype", "bfloat16", "--device", "cpu")
    assert found["model"]["parameters"] == 8_030_261_248
    assert found["kv"]["rungs"][0]["bytes_per_token"] == 131072
    assert found["kv"]["rungs"][0]["capacity_tokens"] == 163840


def test_the_table_lines_up_and_has_no_codes(capsys: pytest.CaptureFixture[str]):
    assert main.main(["env"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out and all(line == line.rstrip() for line in lines)
    values = [line for line in lines if line.startswith("  ") and "effective" not in line][:-1]
    assert len({len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in values}) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--kv", "nope"], 2, "unknown KV preset"),
        (["--dtype", "int3"], 2, "dtype='int3'"),
        (["--device", "tpu"], 2, "device='tpu'"),
        (["--kv-memory", "lots"], 2, "kv_memory='lots'"),
    ],
)
def test_wrong_options(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]):
    assert main.main(["env", *words]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_missing_libraries_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch):
    from qkv_engine.cli import env

    monkeypatch.setattr(env, "_PACKAGES", ("no-such-library",))
    assert env._versions()["no-such-library"] == "not installed"


def test_the_demo_model_answers_as_a_program():
    words = [sys.executable, "-m", "qkv_engine.cli.main", "chat", "--prompt", "What is 47*86?"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4042\n", "")
