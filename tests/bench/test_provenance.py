"""Rows say with what they were measured."""

import platform
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from qkv_engine import __version__
from qkv_engine.bench import provenance as module
from qkv_engine.bench.provenance import Provenance, command_line, commit, cpu_name, driver, provenance


def test_versions_date_and_machine() -> None:
    found = provenance(device="cpu", dtype="float32", threads=3, seed=7)
    assert (found["engine_version"], found["torch_version"]) == (__version__, torch.__version__)
    assert (found["device_name"], found["threads"], found["seed"]) == (cpu_name(), 3, 7)
    assert (found["python_version"], found["commit"]) == (platform.python_version(), commit())
    date = datetime.fromisoformat(found["date"])
    assert date.utcoffset() == timedelta(0) and abs(datetime.now(UTC) - date) < timedelta(minutes=1)
    assert Provenance(**found).machine.startswith(cpu_name())


def test_where_nothing_ran_there_is_no_device() -> None:
    found = Provenance(**provenance(seed=0))
    assert found.device is found.device_name is found.machine is None and found.torch_version


@pytest.mark.parametrize(
    ("fields", "machine"),
    [
        ({"device": "cuda:0", "device_name": "NVIDIA H200", "threads": 16}, "NVIDIA H200"),
        ({"device": "cpu", "device_name": "AMD EPYC", "threads": 1}, "AMD EPYC, 1 thread"),
        ({"device": "cpu", "threads": 8}, "cpu, 8 threads"),
        ({"device": "cuda:1"}, "cuda:1"),
    ],
)
def test_the_machine_in_words(fields: dict, machine: str) -> None:
    assert Provenance(**fields).machine == machine


def test_a_cpu_has_a_name_without_trademark_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_linux_cpu", lambda: "Intel(R) Xeon(R)  Gold 6248 CPU @ 2.50GHz")
    assert cpu_name.__wrapped__() == "Intel Xeon Gold 6248 CPU @ 2.50GHz"
    monkeypatch.setattr(module, "_linux_cpu", lambda: "")
    monkeypatch.setattr(module, "_macos_cpu", lambda: "Apple M3")
    assert cpu_name.__wrapped__() == "Apple M3"
    monkeypatch.setattr(module, "_macos_cpu", lambda: "")
    assert cpu_name.__wrapped__()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit of a source file and of results."""
    for name in ("engine/a.py", "results/a.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return tmp_path


def test_commit_of_a_checkout_and_whether_its_sources_changed(checkout: Path) -> None:
    words = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    (checkout / "results/a.jsonl").write_text("2\n")
    assert commit.__wrapped__(checkout) == head
    (checkout / "engine/a.py").write_text("2\n")
    assert commit.__wrapped__(checkout) == f"{head}+"


def test_no_commit_without_repository_or_git(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()  # as site-packages of an environment inside a checkout
    assert commit.__wrapped__(tmp_path / "inside") is None
    monkeypatch.setenv("PATH", "")
    assert commit.__wrapped__(checkout) is None


def test_command_line_is_that_of_the_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line() is None
    monkeypatch.setattr(sys, "argv", ["/opt/bin/qkv-engine", "bench", "--kv", "a b"])
    assert command_line() == "qkv-engine bench --kv 'a b'"


def test_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 12.2\n")
    assert driver(file) == "580.159.04"
