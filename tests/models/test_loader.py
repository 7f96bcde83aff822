"""Loading: what a checkpoint may look like, and every way in which it can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv_engine.errors import ConfigError, ModelError
from qkv_engine.models import checkpoint as checkpoint_module
from qkv_engine.models import loader

IDS = torch.arange(40)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def rewrite(folder: Path, change) -> None:
    """Apply ``change`` to the dict of tensors and store them again."""
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors) or tensors, folder / WEIGHTS)


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


@pytest.fixture
def refuses(load):
    def check(folder: Path, message: str, **options: object) -> None:
        with pytest.raises(ModelError, match=f"(?s){message}"):
            load(folder, **options)

    return check


# What works


def test_sharded_equals_single(tiny_folder, load, logits_of):
    single = logits_of(load(tiny_folder), IDS)
    shard(tiny_folder)
    assert torch.equal(logits_of(load(tiny_folder), IDS), single)


def test_pieces_smaller_than_a_tensor(tiny_folder, load, logits_of, monkeypatch):
    whole = logits_of(load(tiny_folder), IDS)
    monkeypatch.setattr(checkpoint_module, "_PIECE_BYTES", 1000)
    assert torch.equal(logits_of(load(tiny_folder), IDS), whole)


def test_result_says_what_was_loaded(tiny_folder, load):
    loaded = load(tiny_folder)
    assert loaded.folder == tiny_folder and loaded.name == str(tiny_folder)
    assert loaded.config.num_layers == 2 and not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype(dtype, expected, demo_folder, load):
    loaded = load(demo_folder, dtype=dtype)
    assert loaded.config.dtype is torch.bfloat16
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}


def test_auto_dtype_on_a_gpu_is_the_checkpoints(demo_folder):
    config = loader.read_config(demo_folder)
    assert loader._weight_dtype("auto", config, torch.device("cuda")) is torch.bfloat16


def test_harmless_extra_tensors(tiny_folder, load, logits_of):
    before = logits_of(load(tiny_folder), IDS)
    rewrite(tiny_folder, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(logits_of(load(tiny_folder), IDS), before)


def test_tied_duplicate_must_be_equal(make_reference, tmp_path, load, refuses):
    make_reference("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    table = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": table.clone()})
    load(tmp_path)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": table + 1})
    refuses(tmp_path, r"lm_head\.weight differs from the embedding")


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


def test_memory_stays_near_the_weights(tmp_path):
    """Peak of a load in its own process: the weights, their packed copy one at a time, one buffer; not two copies."""
    code = """
import resource, sys, torch
from qkv_engine.models import load_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
load_model(sys.argv[1], device=torch.device("cpu"))
print(peak() - before)
"""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=8, vocab_size=512
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    weights = (tmp_path / WEIGHTS).stat().st_size / 2**20
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert weights > 120
    assert float(run.stdout) < 1.2 * weights + 48


# Options and names


def test_bad_options(tiny_folder, load):
    with pytest.raises(ConfigError, match=r"load_format='pickle'.*random"):
        load(tiny_folder, load_format="pickle")
    for dtype in ("int8", torch.int8):
        with pytest.raises(ConfigError, match=r"dtype=.*bfloat16"):
            load(tiny_folder, dtype=dtype)


def test_names_that_lead_nowhere(tmp_path, refuses):
    refuses(tmp_path / "absent", "no such folder.*llama-3.1-8b")
    refuses("llama-3.1-8b", 'shape without weights.*load_format="random"')
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuses(tmp_path / "model.gguf", "is a file.*folder")
    refuses(tmp_path, r"config\.json cannot be opened: No such file")


# Random weights


def test_random_weights_are_seeded(load, logits_of):
    first, again, other = (load("demo", load_format="random", seed=seed) for seed in (1, 1, 2))
    assert first.folder is None and first.name == "demo"
    logits = logits_of(first, IDS)
    assert torch.equal(logits, logits_of(again, IDS)) and not torch.equal(logits, logits_of(other, IDS))
    assert bool(logits.isfinite().all())


def test_random_weights_have_the_promised_spread(tiny_folder, load):
    (tiny_folder / WEIGHTS).unlink()
    loaded = load(tiny_folder, load_format="random", dtype="float16")
    assert loaded.folder == tiny_folder
    parameters = dict(loaded.model.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    assert embedding.dtype is torch.float16 and abs(float(embedding.float().std()) - 0.02) < 0.002
    assert bool((parameters["model.norm.weight"] == 1).all())


# Tensors that do not fit the config


def test_missing_tensor(tiny_folder, refuses):
    rewrite(tiny_folder, lambda t: {name: tensor for name, tensor in t.items() if name != UP})
    refuses(tiny_folder, rf"model\.safetensors lack {UP}")


def test_extra_tensor(tiny_folder, refuses):
    rewrite(tiny_folder, lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    refuses(tiny_folder, r"model\.layers\.0\.self_attn\.q_proj\.bias.*LlamaForCausalLM")


@pytest.mark.parametrize("change", [lambda w: w.T, lambda w: w.reshape(-1), lambda w: w[:-1], lambda w: w[:, :, None]])
def test_wrong_shape(tiny_folder, refuses, change):
    rewrite(tiny_folder, lambda t: t | {UP: change(t[UP]).contiguous()})
    refuses(tiny_folder, rf"{UP} has shape .* calls for \[88, 64\]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_wrong_dtype(tiny_folder, refuses, dtype):
    rewrite(tiny_folder, lambda t: t | {UP: t[UP].to(dtype)})
    refuses(tiny_folder, rf"model\.safetensors: tensor {UP} is (I8|F8_E4M3|F64)")


def test_config_far_larger_than_the_files(tiny_folder, refuses, monkeypatch):
    path = tiny_folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 500}
    path.write_text(json.dumps(config))

    def build(config):
        raise AssertionError("sizes are compared before anything is built")

    monkeypatch.setattr(loader, "_build", build)
    refuses(tiny_folder, r"describes [\d,]+ parameters, but model\.safetensors hold")


def test_nothing_is_allocated_before_the_check(tiny_folder, refuses, monkeypatch):
    def materialize(*args):
        raise AssertionError("allocated")

    monkeypatch.setattr(loader, "_materialize", materialize)
    rewrite(tiny_folder, lambda t: t | {UP: t[UP][:-1].contiguous()})
    refuses(tiny_folder, "has shape")


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
    (raw_file(b"{\xff}"), "not valid JSON"),
    (raw_file(b"[" * 100_000), "not valid JSON"),
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
        (b"\xff\xfe{}", "not valid JSON"),
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
