"""Logits equal to transformers', in float32, for every architecture and variant that is supported."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS = [
    ("Llama", {}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": LINEAR}),
    ("Llama", {"rope_parameters": YARN}),
    ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    ("Llama", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}}),
    ("Llama", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}}),
    ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"num_key_value_heads": 1}),
    ("Llama", {"attention_bias": True}),
    ("Llama", {"mlp_bias": True}),
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"rms_norm_eps": 0.1}),
    *[("Llama", {"head_dim": head_dim}) for head_dim in (64, 80, 96, 128, 256)],
    ("Mistral", {"sliding_window": None}),
    ("Mistral", {"sliding_window": 128, "head_dim": 32}),
    ("Qwen2", {}),
    ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("Qwen3", {}),
    ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 128}),
]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_logits_equal_transformers(family, changes, make_reference, load, logits_of, tmp_path):
    reference = make_reference(family, **changes)
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    ids = torch.randint(0, reference.config.vocab_size, (120,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = reference(ids[None]).logits[0]
    assert loaded.config.architecture == f"{family}ForCausalLM"
    assert relative_error(logits_of(loaded, ids), theirs) < 1e-5
    # One prefill, some decode steps, another chunk: where a token is cut must not matter.
    assert relative_error(logits_of(loaded, ids, steps=(70, 1, 1, 1, 47)), theirs) < 1e-5


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, YARN], ids=lambda rope: rope["rope_type"])
def test_scaled_ropes_change_the_logits(rope, make_reference, load, logits_of, tmp_path):
    """Guards the test above: at this length and size every scaling has an effect that it would see."""
    reference = make_reference("Llama", rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    ids = torch.arange(90)
    scaled = logits_of(load(tmp_path), ids)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert relative_error(logits_of(load(tmp_path), ids), scaled) > 1e-2


def test_classic_config_form_means_the_same(make_reference, load, logits_of, tmp_path):
    """``rope_theta``, ``rope_scaling`` and ``torch_dtype``, as written before transformers 5."""
    make_reference("Llama", rope_parameters=LLAMA3).save_pretrained(tmp_path)
    modern = load(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    classic = load(tmp_path)
    assert classic.config == modern.config
    assert torch.equal(logits_of(classic, torch.arange(60)), logits_of(modern, torch.arange(60)))


def test_demo_model(demo_folder, load, logits_of):
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    loaded = load(demo_folder)
    ids = torch.randint(0, 1024, (300,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        theirs = reference(ids[None]).logits[0]
    ours = logits_of(loaded, ids, steps=(256, 1, 43))
    assert relative_error(ours, theirs) < 1e-5
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_stays_near_float32(dtype, bound, demo_folder, load, logits_of):
    ids = torch.arange(40)
    half = logits_of(load(demo_folder, dtype=dtype), ids)
    assert half.dtype == getattr(torch, dtype)
    assert relative_error(half.float(), logits_of(load(demo_folder), ids)) < bound


def test_tokens_of_a_batch_do_not_mix(demo_folder, load):
    """With attention cut out every token is on its own: rows, order and neighbours do not matter."""

    class NoAttention:
        def attend(self, layer, qkv, rotation, norm, key_basis=None):
            return qkv[:, :4]

    loaded = load(demo_folder)
    ids, positions = torch.tensor([5, 9, 5, 700]), torch.tensor([0, 3, 0, 4000])
    with torch.inference_mode():
        hidden = loaded.model(ids, positions, NoAttention())
        alone = loaded.model(ids[3:], positions[3:], NoAttention())
    assert torch.allclose(hidden[0], hidden[2], atol=1e-5)
    assert torch.allclose(hidden[3:], alone, atol=1e-4)
    assert not torch.allclose(hidden[0], hidden[1], atol=1e-2)


def test_no_logits_are_asked_for(demo_folder, load):
    assert load(demo_folder).model.compute_logits(torch.zeros(0, 256)).shape == (0, 1024)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_gpu_equals_cpu(dtype, bound, demo_folder, load, dense_batch):
    """Same model, same dense attention on the CPU; only the model's own arithmetic moves to the GPU."""
    from qkv_engine.kernels.rms_norm import rms_norm
    from qkv_engine.models.loader import load_model
    from qkv_engine.models.rope import Rotation

    class ThroughCPU:
        def __init__(self, batch):
            self.batch = batch

        def attend(self, layer, qkv, rotation, norm, key_basis=None):
            def norm_there(x):
                return rms_norm(x, norm.weight.cpu(), norm.eps)

            rotation = Rotation(*(x.cpu() for x in rotation))
            return self.batch.attend(layer, qkv.cpu(), rotation, norm and norm_there).to(qkv.device)

    ids = torch.arange(60)
    device = torch.device("cuda")
    gpu = load_model(str(demo_folder), device=device, dtype=dtype).model
    cpu = load(demo_folder).model
    cpu_batch, gpu_batch = dense_batch(cpu.config.attention), ThroughCPU(dense_batch(cpu.config.attention))
    with torch.inference_mode():
        theirs = cpu.compute_logits(cpu(ids, ids, cpu_batch))
        ours = gpu.compute_logits(gpu(ids.to(device), ids.to(device), gpu_batch))
    assert ours.device.type == "cuda" and ours.dtype == getattr(torch, dtype)
    assert relative_error(ours.float().cpu(), theirs) < bound
