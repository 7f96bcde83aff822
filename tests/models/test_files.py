"""One reader for every file of a model folder: what it opens, what it refuses, and how it says so."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from qkv_engine.config import EngineConfig
from qkv_engine.errors import ModelError
from qkv_engine.model_files import MAX_BYTES, MAX_JSON_DEPTH, open_inside, parse_json
from qkv_engine.models.checkpoint import read_header
from qkv_engine.presets import resolve_kv
from qkv_engine.startup import start

from .tiny import INDEX, WEIGHTS, shard, write_tiny

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
JSON_FILES = TEXT_FILES[:4]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def load(folder: Path) -> None:
    start(EngineConfig(model=folder, kv=resolve_kv("bf16"), kv_memory="1MiB", device="cpu")).core.free()


def refuses(folder: Path, message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load(folder)
    assert time.monotonic() - begun < 20


def test_the_folder_loads(folder: Path):
    load(folder)


@pytest.mark.parametrize("name", [*TEXT_FILES, WEIGHTS])
def test_a_link_out_of_the_folder_is_refused_even_to_the_right_content(folder: Path, tmp_path: Path, name: str):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    refuses(folder, f"{name} is a link that leaves the model folder")


@pytest.mark.parametrize("name", [*TEXT_FILES, WEIGHTS])
def test_a_link_inside_the_folder_is_followed(folder: Path, name: str):
    (folder / name).rename(folder / "blob")
    (folder / name).symlink_to("blob")
    load(folder)


@pytest.mark.parametrize("name", [*TEXT_FILES, WEIGHTS])
def test_a_fifo_a_device_or_a_folder_is_no_file(folder: Path, name: str):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuses(folder, f"{name} is not a regular file")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refuses(folder, f"{name} is a link that leaves")
    (folder / name).unlink()
    (folder / name).mkdir()
    refuses(folder, f"{name} is not a regular file")


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(folder: Path, tmp_path: Path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    folder.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    load(snapshot)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_file_too_large_is_not_read(folder: Path, name: str):
    os.truncate(folder / name, MAX_BYTES[name] + 1)  # sparse: it has no blocks on the disk
    refuses(folder, f"{name} has {MAX_BYTES[name] + 1} bytes")


@pytest.mark.parametrize("name", TEXT_FILES)
def test_text_is_utf8(folder: Path, name: str):
    (folder / name).write_bytes(b'{"a": "\xff"}')
    refuses(folder, f"{name} is not UTF-8: invalid start byte at byte 7")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}", f"more than {MAX_JSON_DEPTH} levels"),
        ('{"a": 1, "a": 1}', "a key is repeated"),
        ('{"a": "\\ud800"}', "surrogates"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": ' + "9" * 6000 + "}", "is not valid JSON"),
    ],
    ids=["endless", "deep", "repeated", "half a character", "nan", "digits"],
)
def test_json_is_strict(folder: Path, name: str, text: str, message: str):
    (folder / name).write_text(text)
    refuses(folder, f"{name} .*{message}")


def test_depth_is_counted_to_the_level():
    deep = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    assert parse_json(deep, "x") is not None
    with pytest.raises(ModelError, match=f"more than {MAX_JSON_DEPTH} levels"):
        parse_json(b"[" + deep + b"]", "x")


def test_a_pair_of_surrogates_is_a_character():
    assert parse_json(b'["\\ud83d\\ude00 \\\\ud800"]', "x") == ["\U0001f600 \\ud800"]


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "tokenizer_config.json"])
def test_files_a_model_may_lack(folder: Path, name: str):
    (folder / name).unlink()
    load(folder)


def test_the_index_is_read_like_the_rest(folder: Path, tmp_path: Path):
    shard(folder)
    load(folder)
    (folder / INDEX).rename(tmp_path / INDEX)
    (folder / INDEX).symlink_to(tmp_path / INDEX)
    refuses(folder, f"{INDEX} is a link that leaves")


# Headers whose length looks like the beginning of a pickle


@pytest.mark.parametrize("nbytes", [640, 1152, 640 + 65536, 0x380, 0x580])
def test_a_header_of_any_length_is_read(folder: Path, nbytes: int):
    """640 and 1,152 are the bytes 80 02 and 80 04, with which a pickle begins."""
    path = folder / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if length > nbytes:  # too short for this model's names: another file with one tensor
        header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        data = bytes(8 + length + 4)
    text = json.dumps(header).encode().ljust(nbytes)
    assert len(text) == nbytes
    path.write_bytes(struct.pack("<Q", nbytes) + text + data[8 + length :])
    with open_inside(folder, WEIGHTS) as file:
        assert read_header(file, WEIGHTS).keys() == header.keys() - {"__metadata__"}


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04\x14\x00\x00\x00" + bytes(200),
        b"PK\x03\x04\x00\x00\x00\x00" + bytes(200),
        b"\x80\x02}q\x00." + bytes(200),
        b"\x80\x04\x95\x00\x00\x00\x00\x00" + bytes(0x950480 + 8),  # the length is one that the file could have
        struct.pack("<Q", 640) + b"\x80" * 700,
    ],
    ids=["zip", "zip, version 0", "protocol 2", "protocol 4, a frame", "no header"],
)
def test_a_pickle_is_called_one(folder: Path, data: bytes):
    (folder / WEIGHTS).write_bytes(data)
    refuses(folder, "is a pickle, whatever its name says.*save_pretrained")


# Token ids beyond the model's rows


@pytest.mark.parametrize("value", [64, [2, 64], True, "2", 2**63, 10**30, -1, [[2]], 2.0])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ids_beyond_the_models_rows_are_refused(folder: Path, name: str, value: object):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
    refuses(folder, f"{name}: eos_token_id=.* 0 to 63")


def test_a_tokenizer_may_know_more_than_the_model_but_not_its_end(folder: Path):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    extra = dict(tokenizer["added_tokens"][2], id=70, content="<extra>")
    tokenizer["added_tokens"].append(extra)
    tokenizer["model"]["vocab"]["<extra>"] = 70
    path.write_text(json.dumps(tokenizer))
    load(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<extra>"}))
    refuses(folder, r"tokenizer\.json: eos_token=70: the model has no such token.*0 to 63")
