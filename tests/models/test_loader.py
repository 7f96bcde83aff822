"""Loading: options, dtypes, random weights, memory, and checkpoints that do not fit their config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv_engine.errors import ConfigError
from qkv_engine.models import loader

IDS = torch.arange(40)
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def rewrite(folder: Path, change) -> None:
    """Apply ``change`` to the dict of tensors and store them again."""
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors) or tensors, folder / WEIGHTS)


# What works


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
    assert loader.resolve_dtype("auto", config, torch.device("cuda")) is torch.bfloat16


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


def test_memory_stays_near_the_weights(tmp_path):
    """Peak of a load in its own process: the weights, their packed copy one at a time, one buffer; not two copies."""
    code = """
import resource, sys, torch
from qkv_engine.models.loader import load_model
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
    refuses(tmp_path, r"has no config\.json.*safetensors files are needed")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuses(tmp_path / "model.gguf", "is a file.*folder")
    refuses(tmp_path, r"no config\.json, but model\.gguf: GGUF .*safetensors files are needed")


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

    def check(*args):
        raise AssertionError("sizes are compared before tensors are")

    monkeypatch.setattr(loader, "_check_tensors", check)
    refuses(tiny_folder, r"describes [\d,]+ parameters, but model\.safetensors hold")


def test_nothing_is_allocated_before_the_check(tiny_folder, refuses, monkeypatch):
    def materialize(*args):
        raise AssertionError("allocated")

    monkeypatch.setattr(loader, "_materialize", materialize)
    rewrite(tiny_folder, lambda t: t | {UP: t[UP][:-1].contiguous()})
    refuses(tiny_folder, "has shape")
