"""Families by the architecture name in ``config.json``; a new architecture is a line here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from qkv_engine.errors import ModelError

from .cohere import Cohere2ForCausalLM, read_cohere2
from .config import ModelConfig
from .exaone import Exaone4ForCausalLM, read_exaone4
from .fields import Fields
from .gemma import GemmaForCausalLM, read_gemma2, read_gemma3
from .gemma4 import Gemma4ForCausalLM, read_gemma4
from .glm import Glm4ForCausalLM, read_glm
from .gpt_oss import GptOssForCausalLM, read_gpt_oss
from .granite import GraniteForCausalLM, read_granite
from .granite_moe import GraniteMoeForCausalLM, read_granite_moe
from .hunyuan import HunyuanForCausalLM, read_hunyuan
from .layers import QuantizableLayer
from .llama import LlamaForCausalLM, read_llama, read_mistral, read_phi3, read_qwen2, read_qwen3, read_seed_oss
from .ministral import Ministral3ForCausalLM, read_ministral, read_ministral3
from .mixtral import MixtralForCausalLM, read_mixtral
from .moe import MoE
from .olmo import OlmoForCausalLM, read_olmo2, read_olmo3
from .olmoe import OlmoeForCausalLM, read_olmoe
from .qwen3_5 import HybridForCausalLM, Qwen3_5MoeForCausalLM, read_qwen3_5, read_qwen3_5_moe
from .qwen3_moe import Qwen3MoeForCausalLM, read_qwen3_moe
from .qwen3_next import Qwen3NextForCausalLM, read_qwen3_next
from .ranks import ALONE, Ranks
from .rows import full_name
from .smollm import read_smollm3
from .weights.experts import check_experts
from .weights.scheme import UNQUANTIZED, read_scheme

logger = logging.getLogger("qkv_engine")


class ModelFamily(NamedTuple):
    """How models of one architecture are read and built. ``read`` refuses what the model does not compute."""

    model_type: str
    read: Callable[[Fields], ModelConfig]
    model: type[LlamaForCausalLM]


FAMILIES = {
    "Cohere2ForCausalLM": ModelFamily("cohere2", read_cohere2, Cohere2ForCausalLM),
    "Exaone4ForCausalLM": ModelFamily("exaone4", read_exaone4, Exaone4ForCausalLM),
    "Gemma2ForCausalLM": ModelFamily("gemma2", read_gemma2, GemmaForCausalLM),
    "Gemma3ForCausalLM": ModelFamily("gemma3_text", read_gemma3, GemmaForCausalLM),
    "Gemma4ForCausalLM": ModelFamily("gemma4_text", read_gemma4, Gemma4ForCausalLM),
    "Glm4ForCausalLM": ModelFamily("glm4", read_glm, Glm4ForCausalLM),
    "GlmForCausalLM": ModelFamily("glm", read_glm, LlamaForCausalLM),
    "GptOssForCausalLM": ModelFamily("gpt_oss", read_gpt_oss, GptOssForCausalLM),
    "GraniteForCausalLM": ModelFamily("granite", read_granite, GraniteForCausalLM),
    "GraniteMoeForCausalLM": ModelFamily("granitemoe", read_granite_moe, GraniteMoeForCausalLM),
    "GraniteMoeSharedForCausalLM": ModelFamily("granitemoeshared", read_granite_moe, GraniteMoeForCausalLM),
    "HunYuanDenseV1ForCausalLM": ModelFamily("hunyuan_v1_dense", read_hunyuan, HunyuanForCausalLM),
    "LlamaForCausalLM": ModelFamily("llama", read_llama, LlamaForCausalLM),
    "Ministral3ForCausalLM": ModelFamily("ministral3", read_ministral3, Ministral3ForCausalLM),
    "MinistralForCausalLM": ModelFamily("ministral", read_ministral, LlamaForCausalLM),
    "MistralForCausalLM": ModelFamily("mistral", read_mistral, LlamaForCausalLM),
    "MixtralForCausalLM": ModelFamily("mixtral", read_mixtral, MixtralForCausalLM),
    "Olmo2ForCausalLM": ModelFamily("olmo2", read_olmo2, OlmoForCausalLM),
    "Olmo3ForCausalLM": ModelFamily("olmo3", read_olmo3, OlmoForCausalLM),
    "OlmoeForCausalLM": ModelFamily("olmoe", read_olmoe, OlmoeForCausalLM),
    "Phi3ForCausalLM": ModelFamily("phi3", read_phi3, LlamaForCausalLM),
    "Qwen2ForCausalLM": ModelFamily("qwen2", read_qwen2, LlamaForCausalLM),
    "Qwen3ForCausalLM": ModelFamily("qwen3", read_qwen3, LlamaForCausalLM),
    "Qwen3MoeForCausalLM": ModelFamily("qwen3_moe", read_qwen3_moe, Qwen3MoeForCausalLM),
    "Qwen3NextForCausalLM": ModelFamily("qwen3_next", read_qwen3_next, Qwen3NextForCausalLM),
    "Qwen3_5ForCausalLM": ModelFamily("qwen3_5_text", read_qwen3_5, HybridForCausalLM),
    "Qwen3_5MoeForCausalLM": ModelFamily("qwen3_5_moe_text", read_qwen3_5_moe, Qwen3_5MoeForCausalLM),
    "SeedOssForCausalLM": ModelFamily("seed_oss", read_seed_oss, LlamaForCausalLM),
    "SmolLM3ForCausalLM": ModelFamily("smollm3", read_smollm3, LlamaForCausalLM),
}


class Wrapper(NamedTuple):
    """A model of which a family is the text part; ``text_type`` is the model type of a ``text_config`` without one."""

    model_type: str
    text_type: str


WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper("gemma3", "gemma3_text"),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4", "gemma4_text"),
    "Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral"),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe", "qwen3_5_moe_text"),
}
# Fields of a wrapper that stand in where its ``text_config`` leaves them out.
_OUTER_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")


def config_from_hf(hf: object) -> ModelConfig:
    """The configuration in a parsed ``config.json``, in the form of transformers 5 or of earlier releases.

    Raises ``ModelError`` naming the field that is missing, malformed, out of range or not supported.
    """
    fields = Fields(hf)
    architecture = _architecture(fields, {**FAMILIES, **WRAPPERS})
    wrapper = WRAPPERS.get(architecture)
    if wrapper is not None:
        fields = _text_fields(fields, wrapper)
        architecture = _architecture(fields, FAMILIES)
    weights = read_scheme(fields)
    if fields.get("auto_map") is not None:
        logger.warning("config.json names custom code (auto_map); it is ignored, built-in model code is used")
    config = FAMILIES[architecture].read(fields)
    return replace(config, architecture=architecture, is_nested=wrapper is not None, weights=weights)


def build_model(config: ModelConfig, ranks: Ranks = ALONE) -> LlamaForCausalLM:
    """The model on the meta device: its parameters have shapes and no memory."""
    with torch.device("meta"):
        net = FAMILIES[config.architecture].model(config, ranks)
    if config.weights != UNQUANTIZED:
        _set_formats(net, config)
    return net


def _set_formats(net: LlamaForCausalLM, config: ModelConfig) -> None:
    """Gives each layer the format of its projections. Raises ``ModelError`` if they differ, or are not read so."""
    for path, module in net.named_modules():
        if not isinstance(module, QuantizableLayer) or (path == "lm_head" and config.tie_word_embeddings):
            continue
        names = dict.fromkeys(full_name(path, name) for name in module.names())
        found = {config.weights.format_of(name): name for name in reversed(names)}
        if len(found) > 1:
            message = f"{', '.join(reversed(found.values()))} are one matrix here and have different formats"
            raise ModelError(message, field="quantization_config", value=config.weights.name)
        module.format = next(iter(found))
        if isinstance(module, MoE):
            check_experts(path, module, config.weights)


def _text_fields(fields: Fields, wrapper: Wrapper) -> Fields:
    """The decoder's part of the configuration, which a name of the architecture is not part of."""
    text = Fields(fields.get("text_config"), "text_config").given(model_type=wrapper.text_type)
    outer = {name: fields.get(name) for name in _OUTER_FIELDS if fields.get(name) is not None}
    return text.given(**outer).without("architectures")


def _architecture(fields: Fields, known: Mapping[str, ModelFamily | Wrapper]) -> str:
    names = fields.get("architectures")
    if names is None:
        model_type = fields.string("model_type", default="")
        names = [name for name, each in known.items() if each.model_type == model_type] or [model_type]
    if not isinstance(names, list) or len(names) != 1 or type(names[0]) is not str:
        raise fields.error("architectures", "must be a list of one class name")
    architecture: str = names[0]
    supported = f"Supported: {', '.join(known)}"
    if architecture not in known:
        raise ModelError("not supported", field="architecture", value=architecture, remedy=supported)
    expected = known[architecture].model_type
    if fields.string("model_type", default=expected) != expected:
        raise fields.error("model_type", f"contradicts the architecture {architecture}", supported)
    return architecture
