"""A data set through two engines on a cluster of this machine, one of them killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from qkv_engine.cluster.batch import ANSWERS, batch
from qkv_engine.errors import ConfigError

pytestmark = pytest.mark.slow
OPTIONS = {"num_threads": 1, "kv_memory": "64MiB"}


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.chdir(Path(__file__).parent)  # not the root, whose kernels/ would be on the path of Ray's workers
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
    patch.undo()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(number: int) -> dict[str, Any]:
    return {"id": f"q{number}", "messages": [{"role": "user", "content": f"What is {number}*86?"}]}


def run(prompts: Path, output: Path) -> dict[str, dict[str, Any]]:
    rows = batch(prompts, output, options=OPTIONS, params={"max_tokens": 200}, replicas=2, part_rows=8).take_all()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def kill_a_worker(output: Path, killed: list[int]) -> None:
    """Kills one of the two workers once a part is there."""
    while not (output / ANSWERS).is_dir() or not any((output / ANSWERS).iterdir()):
        time.sleep(0.05)
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    workers = [int(line.split()[0]) for line in listed.splitlines() if "ray::" in line and "_Predictor" in line]
    os.kill(workers[0], signal.SIGKILL)
    killed.append(workers[0])


def test_every_prompt_has_one_answer_though_a_worker_dies_and_none_is_made_twice(tmp_path: Path):
    output, killed = tmp_path / "output", list[int]()
    prompts = write(tmp_path / "prompts.jsonl", [question(number) for number in range(10, 74)])
    killer = threading.Thread(target=kill_a_worker, args=(output, killed), daemon=True)
    killer.start()
    rows = run(prompts, output)
    assert len(rows) == 64 and len(killed) == 1
    right = sum(row["generated_text"] == str(86 * int(name[1:])) for name, row in rows.items())
    assert right >= 56
    first = rows["q10"]
    assert (first["finish_reason"], first["error"], first["kv_bits"]) == ("stop", None, 16.0)
    assert len(first["generated_tokens"]) > 4

    before = {path: path.stat().st_mtime_ns for path in (output / ANSWERS).iterdir()}
    more = [question(74), {"id": "none"}, {"id": "long", "prompt": "Hello " * 9000}]
    rows = run(write(prompts, [question(number) for number in range(10, 74)] + more), output)
    assert len(rows) == 67
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert rows["none"]["finish_reason"] == rows["long"]["finish_reason"] == "error"
    assert "max_model_len" in rows["long"]["error"]


@pytest.mark.parametrize("options", [{"replicas": 0}, {"part_rows": 0}, {"options": {"max_num_seqs": 0}}])
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any]):
    with pytest.raises(ConfigError, match="out of range"):
        batch(tmp_path / "prompts.jsonl", tmp_path, **options)


def test_rows_need_ids(tmp_path: Path):
    with pytest.raises(ConfigError, match="a column is missing"):
        batch(write(tmp_path / "prompts.jsonl", [{"prompt": "Hello"}]), tmp_path / "output")
