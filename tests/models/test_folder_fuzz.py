"""Thousands of damaged model folders: no untyped error, no crash, no hang, and nothing outside the folder is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from .tiny import INDEX, WEIGHTS

ROOT = Path(__file__).resolve().parents[2]
# Thousands of cases of the long run.
FILES = {
    "config.json": 4,
    "generation_config.json": 3,
    WEIGHTS: 5,
    INDEX: 3,
    "tokenizer.json": 3,
    "tokenizer_config.json": 3,
    "chat_template.jinja": 1,
}


def fuzz(folder: Path, names: Iterable[str], first: int, count: int, seconds: float) -> Counter[str]:
    """Outcomes of ``count`` seeds, in a process of their own: a crash or a hang is its end, not that of the tests."""
    words = [sys.executable, "-m", "tests.models.folder_fuzz", str(folder), str(first), str(count), *names]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"at {done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    assert not found["failures"], "\n".join(found["failures"][:20])
    return Counter(found["outcomes"])


def test_damaged_folders(tmp_path: Path):
    outcomes = fuzz(tmp_path, FILES, 0, 22, 300)
    assert outcomes.total() == 22 * len(FILES)
    assert all(outcomes[f"{name}: loaded"] and outcomes[f"{name}: ModelError"] for name in FILES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_damaged_folders(name: str, tmp_path: Path, report: list[str]):
    count = 1000 * FILES[name]
    outcomes = fuzz(tmp_path, [name], 1000, count, 1800)
    assert outcomes.total() == count
    report.append(f"damaged folders, {name}: {count:,}, of which {outcomes[f'{name}: loaded']:,} load")
