"""What ``ModelConfig.from_hf`` reads, what it refuses and how it says so."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv_engine.errors import ModelError
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.loader import expected_tensors, num_parameters
from qkv_engine.models.registry import FAMILIES, build_model, config_from_hf
from qkv_engine.models.shapes import SHAPES

LLAMA = SHAPES["llama-3.1-8b"]
MISTRAL = SHAPES["mistral-7b"]
QWEN3 = SHAPES["qwen3-8b"]
QWEN2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
GEMMA = SHAPES["gemma-3-12b"]["text_config"]
HYBRID = SHAPES["qwen3.5-4b"]["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
SIZES = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 2048, "intermediate_size": 8192}
GEMMA4 = SIZES | {"architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144}
YARN = {"rope_type": "yarn", "factor": 4.0}

# parameters of the released models
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_248_023_552,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "gemma-3-12b": 11_766_034_176,  # of the text part
    "demo": 7_739_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3.5-4b": 4_205_751_296,  # of the text part, as of the next
    "qwen3.5-27b": 26_895_998_464,
    "qwen3-next-80b-a3b": 79_674_391_296,  # without the layers that predict further tokens
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LLAMA, 31),
        (HYBRID, 7),
        (HYBRID | {"layer_types": ["full_attention"] * 31 + ["linear_attention"]}, None),
        (GEMMA4, 11),
        (GEMMA4 | {"num_kv_shared_layers": 1}, None),
    ],
)
def test_the_last_layer_may_share_kv_or_have_a_state(fields: dict[str, object], expected: int | None):
    assert config_from_hf(fields).last_attention == expected


def test_reads_llama():
    config = config_from_hf(LLAMA)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (4096, 14336, 128256)
    assert config.ropes[0].rope_type == "llama3" and config.ropes[0].theta == 500000.0
    assert config.ropes[0].original_max_position_embeddings == 8192
    assert config.dtype is torch.bfloat16
    assert config.eos_token_ids == (128001,) and config.bos_token_id == 128000
    assert not (config.attention_bias or config.attention_output_bias or config.mlp_bias or config.qk_norm)


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        (LLAMA, (True, True, False)),
        (MISTRAL, (False, False, False)),
        (QWEN2, (True, False, False)),
        (QWEN3, (True, True, True)),
    ],
)
def test_which_architectures_honour_attention_bias(base, flags):
    config = config_from_hf({**base, "attention_bias": True})
    assert (config.attention_bias, config.attention_output_bias, config.qk_norm) == flags


def test_reads_gemma3_inside_a_vision_model():
    config = config_from_hf(SHAPES["gemma-3-12b"])
    assert config.architecture == "Gemma3ForCausalLM" and config.is_nested and config.tie_word_embeddings
    assert [spec.window for spec in config.attention] == [*[1024] * 5, None] * 8
    assert {(rope.rope_type, rope.theta) for rope in config.ropes} == {("default", 1e4), ("linear", 1e6)}
    assert (config.head_dim, config.vocab_size, config.max_context) == (256, 262208, 131072)
    assert config.dtype is torch.bfloat16 and config.eos_token_ids == (1, 106)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_released_models(name):
    config = config_from_hf(SHAPES[name])
    assert num_parameters(config) == PARAMETERS[name]
    net = build_model(config)
    slots = expected_tensors(net, config)
    assert sum(torch.Size(slot[0].shape).numel() for slot in slots.values()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"num_key_value_heads": None}, "num_kv_heads", 32),
        ({"hidden_size": 2048}, "head_dim", 64),
        ({"head_dim": 256}, "head_dim", 256),
        ({"eos_token_id": [7, 9, 7]}, "eos_token_ids", (7, 9)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"bos_token_id": None}, "bos_token_id", None),
        ({"dtype": "torch.float16"}, "dtype", torch.float16),
        ({"torch_dtype": None}, "dtype", torch.float32),
        ({"architectures": None}, "architecture", "LlamaForCausalLM"),
        ({"quantization_config": None, "some_new_field": {"a": 1}}, "vocab_size", 128256),
    ],
    ids=str,
)
def test_defaults_and_derived_fields(changes, field, expected):
    assert getattr(config_from_hf({**LLAMA, **changes}), field) == expected


def test_qwen3_head_dim_defaults_to_128():
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert config_from_hf({**without, "hidden_size": 1024}).head_dim == 128


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (MISTRAL, {"sliding_window": 32768}),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 4096}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 40960}),
        (QWEN3, {"layer_types": ["full_attention"] * 36}),
    ],
    ids=str,
)
def test_windows_that_hide_nothing_are_accepted(base, changes):
    assert {spec.window for spec in config_from_hf({**base, **changes}).attention} == {None}


REFUSED = [
    # not supported: the message names it and says what is
    (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
    (LLAMA, {"architectures": None, "model_type": "gpt2"}, "gpt2.*LlamaForCausalLM"),
    (LLAMA, {"model_type": "qwen3"}, "model_type.*contradicts"),
    (LLAMA, {"quantization_config": {"quant_method": "gguf"}}, "quantization_config.*quant_method='gguf'.*Supported"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*default, linear, llama3, yarn"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "differ by layer"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": "4096"}, "sliding_window"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 36}, "layer_types.*full_attention"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype.*float8_e4m3fn.*bfloat16"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "64 pairs"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA, {"hidden_activation": "relu"}, "hidden_activation='relu'.*gelu_pytorch_tanh"),
    (GEMMA, {"layer_types": ["chunked_attention"] * 48}, "layer_types.*full_attention"),
    (GEMMA, {"layer_types": ["full_attention"]}, "layer_types.*48"),
    (GEMMA, {"rope_parameters": {"full_attention": 3}}, "rope_parameters"),
    (SHAPES["gemma-3-12b"], {"text_config": None}, "text_config"),
    (SHAPES["gemma-3-12b"], {"text_config": {"model_type": "bert"}}, "bert.*Gemma3"),
    (SHAPES["gemma-3-12b"], {"text_config": {"model_type": "gemma3"}}, "gemma3.*Gemma3ForCausalLM"),
    (SHAPES["gemma-3-12b"], {"quantization_config": {}}, "quantization_config"),
    (SHAPES["phi-4"], {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
    # wrong types and ranges
    (LLAMA, {"hidden_size": True}, "hidden_size=True"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size=4096.0"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size"),
    (LLAMA, {"hidden_size": 10**18}, "hidden_size"),
    (LLAMA, {"hidden_size": None}, "hidden_size=None"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (LLAMA, {"vocab_size": -1}, "vocab_size"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    (LLAMA, {"eos_token_id": 128256}, "eos_token_id.*128255"),
    (LLAMA, {"eos_token_id": [1, True]}, "eos_token_id"),
    (LLAMA, {"architectures": []}, "architectures"),
    (LLAMA, {"architectures": ["LlamaForCausalLM", 3]}, "architectures"),
    # fields that contradict each other
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads.*32"),
    (LLAMA, {"num_key_value_heads": 64}, "num_key_value_heads"),
    (LLAMA, {"hidden_size": 4100}, "head_dim.*4100"),
    (LLAMA, {"head_dim": 127}, "head_dim=127"),
    # rope
    (LLAMA, {"rope_theta": 0}, "rope_theta=0"),
    (LLAMA, {"rope_theta": -1.0}, "rope_theta"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta"),
    (LLAMA, {"rope_scaling": [1]}, "rope_scaling"),
    (LLAMA, {"rope_scaling": {"type": 3}}, "type=3"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor=0.5"),
    (LLAMA, {"rope_scaling": {**LLAMA["rope_scaling"], "high_freq_factor": 1.0}}, "high_freq_factor"),
    (LLAMA, {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_fast"),
    (LLAMA, {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position"),
    (LLAMA, {"rope_scaling": {**YARN, "attention_factor": 0.0}}, "attention_factor"),
]


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_refuses(base, changes, message):
    with pytest.raises(ModelError, match=f"(?s){message}"):
        config_from_hf({**base, **changes})


def test_mistral_without_the_key_has_transformers_default_window():
    without = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert {spec.window for spec in config_from_hf(without).attention} == {4096}


def test_qwen2_has_windows_from_a_layer_on():
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}
    windows = [spec.window for spec in config_from_hf({**QWEN2, **changes}).attention]
    assert windows == [None] * 30 + [4096] * 6


@pytest.mark.parametrize("value", [None, [], "llama", 3])
def test_refuses_what_is_not_an_object(value):
    with pytest.raises(ModelError, match=r"config\.json must be a JSON object"):
        config_from_hf(value)


def test_a_hostile_value_cannot_flood_the_message():
    with pytest.raises(ModelError) as error:
        config_from_hf({**LLAMA, "hidden_act": "x" * 10**6})
    assert len(str(error.value)) < 500


def test_remote_code_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="qkv_engine"):
        config_from_hf({**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    assert "auto_map" in caplog.text


def test_top_level_trained_context_wins_as_in_transformers():
    changes = {"rope_scaling": {**YARN, "original_max_position_embeddings": 100}}
    config = config_from_hf({**LLAMA, **changes, "original_max_position_embeddings": 4096})
    assert config.ropes[0].original_max_position_embeddings == 4096


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-4, 300),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["default", "linear", "yarn", "llama3", "dynamic", "silu", "float16", 10**30]),
    st.lists(st.one_of(st.integers(-2, 99), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
# A small configuration of each family: 4 layers, 4 heads of 16 channels.
SMALL = LLAMA | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "intermediate_size": 88, "vocab_size": 97, "max_position_embeddings": 512}
SMALL |= {"rope_scaling": None, "eos_token_id": 2, "bos_token_id": 1, "vocab_size_per_layer_input": 97}
FAMILY_BASES = [SMALL | {"architectures": [name], "model_type": family.model_type} for name, family in FAMILIES.items()]
FIELDS = sorted({*LLAMA, *QWEN3, "layer_types", "auto_map", "dtype", "original_max_position_embeddings"})
FAMILY_FIELDS = [
    "attention_k_eq_v", "attention_multiplier", "embedding_multiplier", "final_logit_softcapping", "global_head_dim",
    "hidden_activation", "hidden_size_per_layer_input", "layer_norm_eps", "layer_types", "logit_scale",
    "logits_scaling", "no_rope_layer_interval", "no_rope_layers", "num_global_key_value_heads", "num_kv_shared_layers",
    "partial_rotary_factor", "per_layer_config", "query_pre_attn_scalar", "residual_multiplier", "rope_local_base_freq",
    "rope_parameters", "rope_theta", "sliding_window", "sliding_window_pattern", "use_sliding_window",
    "head_dim", "num_hidden_layers", "num_key_value_heads", "clip_qkv", "decoder_sparse_step", "mlp_only_layers",
    "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts",
    "shared_intermediate_size", "swiglu_alpha", "swiglu_limit",
]  # fmt: skip
ROPE_FIELDS = ["rope_type", "type", "factor", "rope_theta", "beta_fast", "beta_slow", "truncate", "mscale"]
ROPE_FIELDS += ["mscale_all_dim", "attention_factor", "low_freq_factor", "original_max_position_embeddings"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3]),
    changes=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE_FIELDS), ODD | st.floats(0.5, 99), max_size=6),
    dropped=st.sets(st.sampled_from(FIELDS), max_size=2),
)
def test_mutated_configs_are_refused_or_usable(base, changes, rope, dropped):
    """Either a ModelError, or a config from which the model and its frequencies can be built at once."""
    hf = {key: value for key, value in copy.deepcopy(base).items() if key not in dropped} | changes
    if rope is not None:
        hf["rope_scaling"] = rope
    try:
        config = config_from_hf(hf)
    except ModelError:
        return
    check_usable(config)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from(FAMILY_BASES),
    changes=st.dictionaries(st.sampled_from(FAMILY_FIELDS), ODD, max_size=4),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE_FIELDS), ODD | st.floats(0.5, 99), max_size=6),
)
def test_mutated_families_are_refused_or_usable(base, changes, rope):
    """The same for the fields of each family."""
    hf = copy.deepcopy(base) | changes | ({} if rope is None else {"rope_scaling": rope})
    try:
        config = config_from_hf(hf)
    except ModelError:
        return
    check_usable(config)


def check_usable(config: ModelConfig) -> None:
    for rope, head_dim in zip(config.ropes, config.head_dims, strict=True):
        frequencies = rope.inverse_frequencies(head_dim)
        assert frequencies.shape == (head_dim // 2,) and bool(frequencies.isfinite().all())
    assert num_parameters(config) > 0


def test_the_largest_accepted_config_builds_quickly():
    """Bounds are tight enough that a hostile config which passes them cannot stall the loader."""
    changes = {"num_hidden_layers": 512, "hidden_size": 2**20, "intermediate_size": 2**20, "vocab_size": 2**24}
    config = config_from_hf({**LLAMA, **changes, "head_dim": 512})
    start = time.thread_time()
    build_model(config)
    assert time.thread_time() - start < 2.0


def test_early_names_of_longrope_in_phi3():
    scaling = {"type": "su", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 4096}
    config = config_from_hf(SHAPES["phi-4"] | changes)
    assert config.ropes[0].rope_type == "longrope" and config.max_context == 16384
    assert config.for_context(4096) == config != config.for_context(4097)
