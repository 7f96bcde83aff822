"""A random Llama of two layers and a tokenizer of letters, written without transformers: a folder to be damaged."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
}
GENERATION: dict[str, Any] = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"


TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": {"content": "<s>", "special": True},
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "add_bos_token": True,
    "add_eos_token": False,
    "model_max_length": 512,
    "chat_template": [
        {"name": "default", "template": "{% for message in messages %}{{ message.content }}</s>{% endfor %}"},
        {"name": "rag", "template": "x"},
    ],
    "added_tokens_decoder": {"0": {"content": "<pad>", "special": True}},
}


def write_tiny(folder: Path, **changes: Any) -> Path:
    """All files of a model that loads; ``changes`` are of its config.json."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    save_file(tiny_tensors(config), folder / WEIGHTS)
    return folder


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Letters, a few pairs and three special tokens, with every kind of component."""
    special = ("<pad>", "<s>", "</s>")
    words = (*special, " ", *string.ascii_lowercase, "th", "he", "the")
    vocab = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("t", "h"), ("h", "e"), ("th", "e")]))
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Lowercase(), tokenizers.normalizers.Replace("_", " ")]
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(" ?[a-z]+"), "isolated")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Fuse()])
    return backend


def shard(folder: Path) -> None:
    """The one weight file as two with an index."""
    tensors = tiny_tensors(json.loads((folder / "config.json").read_text()))
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for part in range(2):
        name = f"model-{part + 1:05}-of-00002.safetensors"
        mine = {key: tensors[key] for key in sorted(tensors)[part::2]}
        save_file(mine, folder / name)
        weight_map |= dict.fromkeys(mine, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def tiny_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under their names in a checkpoint."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {
            f"{at}.self_attn.{name}_proj.weight": (rows, hidden)
            for name, rows in zip("qkvo", (hidden, kv, kv, hidden), strict=True)
        }
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    generator = torch.Generator().manual_seed(0)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
