"""Every family against transformers: log-probabilities in pieces, and greedy tokens of the engine in chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv_engine import Engine, ModelError, SamplingParams
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.loader import LoadedModel, find_model, load_weights
from qkv_engine.models.registry import FAMILIES, config_from_hf
from qkv_engine.presets import PRESETS

from .conftest import config_class, fill
from .test_engine_parity import assert_greedy

# Odd sizes: 3 query heads a KV head, a vocabulary and inner features that are prime.
ODD = {
    "vocab_size": 97,
    "hidden_size": 60,
    "intermediate_size": 89,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
HIDDEN = ODD | {"hidden_size": 120}  # for families whose heads divide the hidden size
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MIXED = [SLIDING, FULL, SLIDING, SLIDING]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.6,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
BY_KIND = {FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, SLIDING: {"rope_theta": 1e4}}
GEMMA4 = ODD | {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 37,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 10,
    "global_head_dim": 40,
}
EXPERTS = {"num_local_experts": 7, "num_experts_per_tok": 3}
OWN_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3}
HYBRID = ODD | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4},
}
GRANITE_MOE = (
    HIDDEN
    | EXPERTS
    | {
        "attention_multiplier": 0.11,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.7,
        "attention_bias": True,
    }
)
# The models of transformers 5.17 have numbers of their own in place of these.
CLAMP = {"swiglu_limit": 0.5, "swiglu_alpha": 1.1} if hasattr(transformers.GptOssConfig, "swiglu_limit") else {}
GPT_OSS = ODD | EXPERTS | {"sliding_window": 37, "rope_parameters": YARN_OF_GPT_OSS}
FAMILY_CASES: list[tuple[str, dict[str, Any]]] = [
    ("Cohere2", HIDDEN | {"sliding_window": 37, "logit_scale": 3.0}),
    ("Cohere2", HIDDEN | {"layer_types": MIXED, "sliding_window": 23, "attention_bias": True, "logit_scale": 2.0}),
    ("Exaone4", ODD | {"sliding_window": 37}),
    ("Exaone4", ODD | {"sliding_window": None, "layer_types": [FULL] * 4}),
    ("Gemma2", ODD | {"sliding_window": 37, "query_pre_attn_scalar": 30, "attn_logit_softcapping": 5.0}),
    ("Gemma3", ODD | {"sliding_window": 37, "query_pre_attn_scalar": 30, "sliding_window_pattern": 3}),
    ("Gemma3", ODD | {"sliding_window": 23, "layer_types": MIXED, "rope_parameters": BY_KIND}),
    ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}),
    ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 1, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "global_head_dim": 20}),
    ("Glm", ODD | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("Glm4", ODD | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.6}}),
    ("GptOss", GPT_OSS),
    ("GptOss", GPT_OSS | CLAMP | {"layer_types": MIXED, "attention_bias": False}),
    (
        "Granite",
        HIDDEN
        | {
            "attention_multiplier": 0.11,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.7,
            "mlp_bias": True,
        },
    ),
    ("GraniteMoe", GRANITE_MOE),
    ("GraniteMoeShared", GRANITE_MOE),
    ("GraniteMoeShared", GRANITE_MOE | {"shared_intermediate_size": 31}),
    ("HunYuanDenseV1", ODD | {"attention_bias": True}),
    (
        "HunYuanDenseV1",
        ODD | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    ("Ministral", ODD | {"sliding_window": 37, "layer_types": MIXED}),
    ("Ministral3", ODD | {"rope_parameters": YARN}),
    ("Ministral3", ODD | {"rope_parameters": YARN, "sliding_window": 37}),
    ("Mistral", ODD | {"sliding_window": 37}),
    ("Mixtral", ODD | EXPERTS | {"sliding_window": 37}),
    ("Mixtral", ODD | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ("Olmo2", HIDDEN | {"attention_bias": True}),
    ("Olmo3", HIDDEN | {"sliding_window": 37}),
    ("Olmo3", HIDDEN | {"sliding_window": 23, "layer_types": MIXED, "rope_parameters": BY_KIND}),
    ("Olmoe", HIDDEN | OWN_EXPERTS | {"attention_bias": True}),
    ("Olmoe", HIDDEN | OWN_EXPERTS | {"norm_topk_prob": True, "num_key_value_heads": 6}),
    ("Phi3", HIDDEN | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.6}}),
    ("Phi3", HIDDEN | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024}),
    ("Phi3", HIDDEN | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24, "sliding_window": 37}),
    ("Qwen2", ODD | {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 2, "head_dim": 10}),
    ("Qwen3Moe", ODD | OWN_EXPERTS | {"moe_intermediate_size": 23, "mlp_only_layers": [1], "norm_topk_prob": True}),
    ("Qwen3Moe", ODD | OWN_EXPERTS | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 37}),
    ("Qwen3Next", HYBRID | OWN_EXPERTS | {"moe_intermediate_size": 23, "shared_expert_intermediate_size": 31}),
    ("Qwen3Next", HYBRID | OWN_EXPERTS | {"layer_types": [FULL, LINEAR, LINEAR, FULL], "mlp_only_layers": [1]}),
    ("Qwen3_5", HYBRID),
    ("Qwen3_5", HYBRID | {"layer_types": [LINEAR, FULL, LINEAR, LINEAR], "attention_bias": True}),
    ("Qwen3_5Moe", HYBRID | OWN_EXPERTS | {"moe_intermediate_size": 23, "shared_expert_intermediate_size": 31}),
    ("SeedOss", ODD | {"attention_out_bias": True, "mlp_bias": True}),
    ("SmolLM3", HIDDEN | {"attention_bias": True, "mlp_bias": True}),
    ("SmolLM3", HIDDEN | {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 37}),
]
PROMPT_LENGTHS = (1, 33, 129, 300)
NEW_TOKENS = 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
IDS = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(1))


def case_id(value: object) -> str:
    """The family, or what its config has beside ``ODD``."""
    own = {key: x for key, x in value.items() if x != ODD.get(key)} if isinstance(value, dict) else value
    return str(own)[:80]


def load_for(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The model in ``folder`` for requests of up to 512 tokens."""
    source = find_model(str(folder))
    source = replace(source, config=source.config.for_context(512))
    return load_weights(source, dtype=dtype, device=torch.device("cpu"))


def plain_attention(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """The attention of ``config`` without window, soft cap and scale of its own."""
    return tuple(AttentionSpec(*spec[:3], spec.head_dim**-0.5) for spec in config.attention)


@pytest.mark.parametrize(("family", "changes"), FAMILY_CASES, ids=case_id)
def test_logprobs_equal_transformers(
    family: str,
    changes: dict[str, Any],
    saved: Callable[..., transformers.PreTrainedModel],
    logits_of: Callable[..., Tensor],
    tmp_path: Path,
) -> None:
    reference, loaded = saved(family, changes), load_for(tmp_path)
    with torch.inference_mode():
        theirs = reference(IDS[None]).logits[0].log_softmax(-1)
        exact = reference.double()(IDS[None]).logits[0].log_softmax(-1)
    # Delta nets amplify roundings, on some processors more: then as near as theirs are to those in float64, twice over.
    bound = max(1e-4, 2 * float((theirs - exact).abs().max()))
    assert loaded.config.architecture == f"{family}ForCausalLM" and bound < 1e-3
    for steps in ((), (37, 1, 1, 130, 1, 130)):
        ours = logits_of(loaded, IDS, steps=steps).log_softmax(-1)
        assert (ours - theirs).abs().max() < bound
    assert theirs.exp().max() > 0.02  # far from even: another model would be seen


@pytest.mark.parametrize(("family", "changes"), FAMILY_CASES, ids=case_id)
def test_greedy_tokens_equal_transformers(
    family: str, changes: dict[str, Any], saved: Callable[..., transformers.PreTrainedModel], tmp_path: Path
) -> None:
    """A batch of prompts in chunks of at most 48 tokens."""
    reference = saved(family, changes)
    prompts = [IDS[:length].tolist() for length in PROMPT_LENGTHS]
    with Engine(tmp_path, kv="fp32", kv_memory="32MiB", device="cpu", max_num_batched_tokens=48) as engine:
        outputs = engine.generate(prompts, PARAMS)
    for output in outputs:
        assert_greedy(reference, output, NEW_TOKENS)


@pytest.mark.parametrize("family", ["Exaone4", "Gemma2", "Granite", "Mistral"])
def test_attention_options_change_the_logprobs(
    family: str, saved: Callable[..., Any], logits_of: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Guards the tests above: at these sizes they would see a window, a scale or a soft cap that is not there."""
    saved(family, next(changes for name, changes in FAMILY_CASES if name == family))
    loaded = load_for(tmp_path)
    plain = replace(loaded, config=replace(loaded.config, attention=plain_attention(loaded.config)))
    ours, without = (logits_of(each, IDS).log_softmax(-1) for each in (loaded, plain))
    assert (ours - without).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "changes"), dict(FAMILY_CASES).items(), ids=case_id)
def test_half_precision_stays_near_float32(
    family: str, changes: dict[str, Any], saved: Callable[..., Any], logits_of: Callable[..., Tensor], tmp_path: Path
) -> None:
    saved(family, changes)
    ours, half = (logits_of(load_for(tmp_path, dtype), IDS[:60]) for dtype in (torch.float32, torch.bfloat16))
    assert half.dtype is torch.bfloat16
    bound = 0.2 if "num_experts_per_tok" in changes else 0.1  # experts with near logits may be others
    assert (half.float() - ours).norm() / ours.norm() < bound


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), dict(FAMILY_CASES).items(), ids=case_id)
def test_random_weights_and_low_precision_run(
    family: str, changes: dict[str, Any], saved: Callable[..., Any], tmp_path: Path
) -> None:
    saved(family, changes)
    kv = replace(PRESETS["int4"], narrow_windows=True)
    with Engine(tmp_path, load_format="random", kv=kv, kv_memory="8MiB", device="cpu") as engine:
        output = engine.generate([IDS.tolist()], PARAMS)[0]
    assert output.error is None and output.kv.lowest_bits == 4


def test_projections_that_readers_of_kv_do_not_use_are_ignored(saved: Callable[..., Any], tmp_path: Path) -> None:
    saved("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2})
    tensors = load_file(tmp_path / "model.safetensors")
    unused = {f"model.layers.4.self_attn.{name}.weight": torch.zeros(3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | unused, tmp_path / "model.safetensors")
    load_for(tmp_path)
    save_file(tensors | {"model.layers.2.self_attn.v_norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.v_norm"):
        load_for(tmp_path)


def test_every_architecture_is_tested() -> None:
    from .test_parity import VARIANTS

    assert {f"{family}ForCausalLM" for family, _ in (*FAMILY_CASES, *VARIANTS)} == set(FAMILIES)


WRAPPED = [
    ("Gemma3", "Gemma3Text", {"sliding_window": 37, "query_pre_attn_scalar": 30}),
    (
        "Gemma4",
        "Gemma4Text",
        GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    ("Mistral3", "Mistral", {"sliding_window": None}),
    ("Mistral3", "Ministral3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
]
VISION = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("hub_names", [True, False], ids=["hub", "transformers5"])
@pytest.mark.parametrize(("wrapper", "text", "changes"), WRAPPED, ids=str)
def test_text_parts_of_vision_checkpoints_load(
    wrapper: str,
    text: str,
    changes: dict[str, Any],
    hub_names: bool,
    logits_of: Callable[..., Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    tied = changes.get("tie_word_embeddings", text.startswith("Gemma"))
    text_config = getattr(transformers, f"{text}Config")(**{**ODD, **changes, "tie_word_embeddings": tied})
    vision_type = {"Gemma3": "siglip_vision_model", "Gemma4": "gemma4_vision"}.get(wrapper, "pixtral")
    config = getattr(transformers, f"{wrapper}Config")(
        text_config=text_config.to_dict(),
        vision_config=VISION | {"model_type": vision_type},
        tie_word_embeddings=tied,
        mm_tokens_per_image=4,
    )
    reference = getattr(transformers, f"{wrapper}ForConditionalGeneration")(config).eval()
    fill(reference)
    reference.save_pretrained(tmp_path)
    if not hub_names:
        state = {
            name: x.clone() for name, x in reference.state_dict().items() if not (tied and name == "lm_head.weight")
        }
        save_file(state, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="qkv_engine"):
        loaded = load_for(tmp_path)
    assert len([record for record in caplog.records if "vision" in record.message]) == 1
    with torch.inference_mode():
        theirs = reference(input_ids=IDS[None]).logits[0].log_softmax(-1)
    assert (logits_of(loaded, IDS).log_softmax(-1) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("family", sorted({family for family, _ in FAMILY_CASES}))
def test_fields_left_out_mean_the_same_as_in_transformers(family: str) -> None:
    """A configuration of sizes alone is read like the one that transformers completes."""
    sizes: dict[str, Any] = {
        "vocab_size": 300_000,
        "hidden_size": 3072,
        "intermediate_size": 4096,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "max_position_embeddings": 65536,
    }
    if family in ("Gemma4", "Ministral3"):
        sizes["rope_parameters"] = None
    completed = json.loads(config_class(family)(**sizes).to_json_string(use_diff=False))
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": completed["model_type"]}
    ours, theirs = (config_from_hf(hf | names) for hf in (sizes, completed))
    tokens: dict[str, Any] = {"eos_token_ids": (), "bos_token_id": None}  # of no effect on the model
    assert replace(ours, **tokens) == replace(theirs, **tokens)
