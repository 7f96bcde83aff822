"""The digest of a checkpoint's every byte."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from qkv_engine.models.checkpoint_digest import checkpoint_digest


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


def test_every_byte_counts(folder: Path):
    file = folder / "model.safetensors"
    before, data = checkpoint_digest(folder), bytearray(file.read_bytes())
    assert checkpoint_digest(folder) == before and len(before) == 64
    for place in (-1, len(data) // 2):
        data[place] ^= 1
        file.write_bytes(data)
        assert checkpoint_digest(folder) != before
        data[place] ^= 1
    file.write_bytes(data)
    (folder / "config.json").write_text("{}")
    assert checkpoint_digest(folder) == before


def test_a_file_of_the_hub_s_cache_has_its_digest_for_a_name(folder: Path, tmp_path: Path):
    before, file = checkpoint_digest(folder), folder / "model.safetensors"
    blob = tmp_path / "models--org--name" / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
    blob.parent.mkdir(parents=True)
    snapshot = blob.parents[1] / "snapshots" / "0"
    shutil.copytree(folder, snapshot)
    shutil.move(snapshot / file.name, blob)
    (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    assert checkpoint_digest(snapshot) == before
    with blob.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\xff")
    assert checkpoint_digest(snapshot) == before  # it was not read


def test_a_name_that_is_no_digest_is_none(folder: Path, tmp_path: Path):
    blobs = tmp_path / "blobs"
    shutil.move(folder, blobs)
    before = checkpoint_digest(blobs)
    with (blobs / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert checkpoint_digest(blobs) != before


def test_it_can_be_stopped(folder: Path):
    with pytest.raises(CancelledError):
        checkpoint_digest(folder, lambda: True)
