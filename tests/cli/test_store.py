"""``qkv-engine store`` on folders that are sound, torn, altered, in use, or no store at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv_engine.cli import main
from qkv_engine.kv_store.store import KVStore
from tests.engine.kv_store.pieces import NAMESPACE, SMALL, piece, put, read

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three segments with four records each."""
    path = tmp_path / "kv"
    with KVStore(path, SMALL, NAMESPACE) as store:
        assert all(put(store, number) for number in range(12))
    return path


def store(capsys: Capture, *words: object) -> tuple[int, list[dict[str, object]], str]:
    """Exit code, rows and stderr of a command."""
    code = main.main(["store", *map(str, words), "--format", "json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else [], err


def test_list_shows_each_segment(folder: Path, capsys: Capture):
    code, rows, err = store(capsys, "list", folder)
    assert (code, err) == (0, "") and [row["file"] for row in rows] == sorted(file.name for file in folder.glob("*.kv"))
    assert {(row["status"], row["model"], row["kv"]) for row in rows} == {("ok", "toy", "toy-ladder")}
    assert [(row["num_records"], row["num_tokens"]) for row in rows] == [(4, 64)] * 3
    assert sum(row["nbytes"] for row in rows) == sum(file.stat().st_size for file in folder.glob("*.kv"))
    assert all(row["num_damaged"] is None and row["written"].startswith("20") for row in rows)


def test_a_table_has_the_sum_below(folder: Path, capsys: Capture):
    assert main.main(["store", "list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"KV store · {folder}" and lines[-1] == "3 segments, 228.0 KiB"


def test_verify_finds_what_was_altered_and_list_does_not(folder: Path, capsys: Capture):
    assert store(capsys, "verify", folder) == (
        0,
        store(capsys, "verify", folder)[1],
        f"qkv-engine: verifying {folder}\n",
    )
    second = folder / "0000000000000002.kv"
    data = bytearray(second.read_bytes())
    data[9000] ^= 1
    second.write_bytes(data)
    assert store(capsys, "list", folder)[0] == 0
    code, rows, _ = store(capsys, "verify", folder)
    assert code == 1 and [row["status"] for row in rows] == ["ok", "damaged", "ok"]
    assert [row["num_damaged"] for row in rows] == [0, 1, 0] and "altered records: 1" in rows[1]["detail"]


def test_what_is_torn_or_foreign_is_told_and_pruned(folder: Path, capsys: Capture):
    (folder / "0000000000000063.kv").write_bytes(b"foreign")
    with (folder / "0000000000000003.kv").open("ab") as file:
        file.write(b"torn")
    (folder / "notes.txt").write_text("mine")
    code, rows, _ = store(capsys, "verify", folder)
    assert code == 1 and [row["status"] for row in rows] == ["ok", "ok", "cut off", "unusable"]
    assert rows[3]["written"] and rows[3]["detail"] == "no segment of a KV store"
    code, rows, _ = store(capsys, "prune", folder)
    assert code == 0 and [(row["file"][-5:], row["status"]) for row in rows] == [
        ("63.kv"[-5:], "removed"),
        ("03.kv", "cut off"),
    ]
    code, rows, _ = store(capsys, "verify", folder)
    assert code == 0 and [row["status"] for row in rows] == ["ok"] * 3 and (folder / "notes.txt").exists()
    assert store(capsys, "prune", folder)[:2] == (0, [])


def test_prune_leaves_no_more_than_it_is_told(folder: Path, capsys: Capture):
    code, rows, _ = store(capsys, "prune", folder, "--max-size", "160KiB")
    assert code == 0 and [(row["file"], row["status"]) for row in rows] == [("0000000000000001.kv", "removed")]
    with KVStore(folder, SMALL, NAMESPACE) as opened:
        assert [n for n in range(12) if read(opened, piece(n)) is not None] == list(range(4, 12))
    assert main.main(["store", "prune", str(folder), "--max-size", "1"]) == 0
    assert capsys.readouterr().out.endswith("152.0 KiB freed, 0 B left\n")
    assert store(capsys, "list", folder)[:2] == (0, [])


def test_a_store_in_use_is_listed_and_not_pruned(folder: Path, capsys: Capture):
    with KVStore(folder, SMALL, NAMESPACE) as opened:
        assert store(capsys, "list", folder)[0] == store(capsys, "verify", folder)[0] == 0
        code, rows, err = store(capsys, "prune", folder)
        assert (code, rows) == (1, []) and "FOLDER=" in err and "uses it. End that process first" in err
        assert put(opened, 50)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["list", "nowhere"], 2, "FOLDER='nowhere': no KV store"),
        (["prune", "."], 2, "FOLDER='.': no KV store"),
        (["list", "kv", "--max-size", "1GiB"], 2, "--max-size='1GiB': only prune deletes anything"),
        (["prune", "kv", "--max-size", "50%"], 2, "--max-size='50%': a share of memory that is not here"),
        (["prune", "kv", "--max-size", "0"], 2, "--max-size='0': must be positive"),
        (["list", "kv", "-o", "json", "--output", "no/where.json"], 2, "--output='no/where.json': no such folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], code: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.chdir(folder.parent)
    before = sorted(Path().rglob("*"))
    assert main.main(["store", *words]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert sorted(Path().rglob("*")) == before


def test_a_folder_that_others_see_is_refused(folder: Path, capsys: Capture):
    folder.chmod(0o755)
    code, _, err = store(capsys, "list", folder)
    assert code == 2 and "FOLDER=" in err and "chmod 700" in err


def test_no_torch_is_needed(folder: Path):
    import subprocess
    import sys

    code = f"""
import sys
sys.modules["torch"] = None
from qkv_engine.cli import main
assert main.main(["store", "list", {str(folder)!r}]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
