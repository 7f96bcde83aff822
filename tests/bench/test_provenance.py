"""Rows say with what they were measured."""

from datetime import UTC, datetime, timedelta

import pytest
import torch

from qkv_engine import __version__
from qkv_engine.bench import provenance as module
from qkv_engine.bench.provenance import Provenance, cpu_name, provenance


def test_versions_date_and_machine() -> None:
    found = provenance(device="cpu", dtype="float32", threads=3, seed=7)
    assert (found["engine_version"], found["torch_version"]) == (__version__, torch.__version__)
    assert (found["device_name"], found["threads"], found["seed"]) == (cpu_name(), 3, 7)
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
