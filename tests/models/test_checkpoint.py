"""Checkpoint files: shards, links, and every way in which a file or an index can be wrong or hostile."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv_engine.errors import ModelError
from qkv_engine.models import checkpoint as checkpoint_module
from qkv_engine.models import loader

IDS = torch.arange(40)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def shard(folder: Path, num_shards: int = 3) -> dict[str, str]:
    """Split the one file into several with an index; returns the index's weight_map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::num_shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# What works


def test_sharded_equals_single(tiny_folder, load, logits_of):
    single = logits_of(load(tiny_folder), IDS)
    shard(tiny_folder)
    assert torch.equal(logits_of(load(tiny_folder), IDS), single)


def test_pieces_smaller_than_a_tensor(tiny_folder, load, logits_of, monkeypatch):
    whole = logits_of(load(tiny_folder), IDS)
    monkeypatch.setattr(checkpoint_module, "_PIECE_BYTES", 1000)
    assert torch.equal(logits_of(load(tiny_folder), IDS), whole)


def test_links_within_the_folder_and_within_a_hub_cache(tiny_folder, load, tmp_path):
    (tiny_folder / WEIGHTS).rename(tiny_folder / "blob")
    (tiny_folder / WEIGHTS).symlink_to("blob")
    load(tiny_folder)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for name, source in (("config.json", "config.json"), (WEIGHTS, "blob")):
        shutil.copy(tiny_folder / source, blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    load(snapshot)


# Files that are not what they say


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -100_000])
def test_truncated_file(tiny_folder, refuses, keep):
    path = tiny_folder / WEIGHTS
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refuses(tiny_folder, r"model\.safetensors.*truncated")


def test_file_that_shrinks_while_it_is_read(tiny_folder, refuses, monkeypatch):
    path = tiny_folder / WEIGHTS
    materialize = loader._materialize

    def shrink(*args):
        materialize(*args)
        os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(loader, "_materialize", shrink)
    refuses(tiny_folder, r"model\.safetensors is truncated")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_FILES = [
    (b"PK\x03\x04" + bytes(100), "pickle.*save_pretrained"),
    (b"\x80\x02}q\x00." + bytes(100), "pickle"),
    (struct.pack("<Q", 2**62) + b"{}", "not a safetensors file"),
    (raw_file(b"{\xff}"), "not UTF-8"),
    (raw_file(b"{" * 100_000), "not valid JSON"),
    (raw_file(b"[" * 100_000), "not an object"),
    (raw_file(b" {}"), "not an object"),
    (raw_file(b"[]"), "not an object"),
    (raw_file(b'{"a": 1, "a": 2}'), "repeated"),
    (raw_file({"a": {**GOOD, "extra": 1}}, bytes(8)), "tensor a is not described"),
    (raw_file({"a": {**GOOD, "dtype": "Q4"}}, bytes(8)), "a has an unknown dtype"),
    (raw_file({"a": {**GOOD, "shape": [-2]}}, bytes(8)), "a has a malformed shape"),
    (raw_file({"a": {**GOOD, "shape": [True, 2]}}, bytes(8)), "a has a malformed shape"),
    (raw_file({"a": {**GOOD, "shape": [2**62, 2**62]}}, bytes(8)), "a has 8 bytes where"),
    (raw_file({"a": {**GOOD, "data_offsets": [8, 0]}}, bytes(8)), "a has -8 bytes where"),
    (raw_file({"a": {**GOOD, "data_offsets": [4, 12]}}, bytes(12)), "a overlaps .* or leaves a hole"),
    (raw_file({"a": GOOD, "b": GOOD}, bytes(8)), "b overlaps"),
    (raw_file({"a": GOOD}, bytes(9)), "1 bytes after its last tensor"),
    (raw_file({"a/../b": GOOD}, bytes(8)), "is not a tensor name"),
]


@pytest.mark.parametrize(("data", "message"), BAD_FILES, ids=[message for _, message in BAD_FILES])
def test_malformed_file(tiny_folder, refuses, data, message):
    (tiny_folder / WEIGHTS).write_bytes(data)
    refuses(tiny_folder, message)


def test_only_pickled_weights(tiny_folder, refuses):
    (tiny_folder / WEIGHTS).rename(tiny_folder / "pytorch_model.bin")
    refuses(tiny_folder, r"pytorch_model\.bin.*save_pretrained")


def test_no_weights(tiny_folder, refuses):
    (tiny_folder / WEIGHTS).unlink()
    refuses(tiny_folder, r"neither model\.safetensors nor")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, INDEX])
def test_fifo_does_not_hang(tiny_folder, refuses, name):
    shard(tiny_folder) if name == INDEX else None
    (tiny_folder / name).unlink()
    os.mkfifo(tiny_folder / name)
    refuses(tiny_folder, f"{name} is not a regular file")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_directory_or_link_loop_in_place_of_a_file(tiny_folder, refuses, name):
    (tiny_folder / name).unlink()
    (tiny_folder / name).mkdir()
    refuses(tiny_folder, f"{name} is not a regular file")
    (tiny_folder / name).rmdir()
    (tiny_folder / name).symlink_to(name)
    refuses(tiny_folder, f"{name} cannot be opened")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_link_out_of_the_folder(tiny_folder, refuses, tmp_path, name):
    (tiny_folder / name).rename(tmp_path / name)
    (tiny_folder / name).symlink_to(tmp_path / name)
    refuses(tiny_folder, f"{name} is a link that leaves the model folder")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"hidden_size": 1, "hidden_size": 2}', "repeated"),
        (b'{"rms_norm_eps": NaN}', "NaN is not a JSON number"),
        (b"{" + b" " * 2**20 + b"}", "at most 1048576 are read"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
    ids=["repeated", "nan", "huge", "utf16", "deep", "empty", "digits"],
)
def test_malformed_config_file(tiny_folder, refuses, data, message):
    (tiny_folder / "config.json").write_bytes(data)
    refuses(tiny_folder, rf"config\.json.*{message}")


# Shards and their index


@pytest.mark.parametrize(
    "name",
    [
        "../tiny/model.safetensors",
        "/etc/passwd.safetensors",
        "sub/model.safetensors",
        "..\\x.safetensors",
        "..",
        ".safetensors",
        "a\0.safetensors",
        "",
        "pytorch_model.bin",
        3,
        None,
        ["x"],
    ],
)
def test_shard_names_must_be_plain(tiny_folder, refuses, name):
    weight_map = shard(tiny_folder)
    write_index(tiny_folder, weight_map | {UP: name})
    refuses(tiny_folder, "not a plain file name|not in a .safetensors file")


def test_missing_shard(tiny_folder, refuses):
    shard(tiny_folder)
    (tiny_folder / "model-00002-of-00003.safetensors").unlink()
    refuses(tiny_folder, r"model-00002-of-00003\.safetensors cannot be opened")


def test_tensor_in_two_shards(tiny_folder, refuses):
    weight_map = shard(tiny_folder)
    other = next(name for name in set(weight_map.values()) if name != weight_map[UP])
    save_file(load_file(tiny_folder / other) | {UP: torch.zeros(88, 64)}, tiny_folder / other)
    refuses(tiny_folder, rf"{other}: tensor {UP} is present but not listed")


def test_tensor_in_two_shards_of_a_lenient_index(tmp_path, tiny_folder):
    """The same tensor twice is refused on its own account too, whatever the index says."""
    shard(tiny_folder, 2)
    files = sorted(tiny_folder.glob("model-*.safetensors"))
    shutil.copy(files[0], files[1])
    names = set(load_file(files[0]))

    class Lenient(checkpoint_module.Checkpoint):
        pass

    shards = {file.name: names for file in files}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelError, match=r"is in .* and again in"):
        patch.setattr(checkpoint_module, "_shards", lambda folder: shards)
        Lenient(tiny_folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(tiny_folder, refuses, weight_map):
    shard(tiny_folder)
    write_index(tiny_folder, weight_map)
    refuses(tiny_folder, "no weight_map")


def test_index_that_promises_too_much(tiny_folder, refuses):
    weight_map = shard(tiny_folder)
    write_index(tiny_folder, weight_map | {"model.ghost": "model-00001-of-00003.safetensors"})
    refuses(tiny_folder, r"model\.ghost is listed in the index but missing")


def test_open_files_are_closed_after_a_failure(tiny_folder, refuses):
    shard(tiny_folder)
    (tiny_folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(5):
        refuses(tiny_folder, "model-00003")
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after <= before
