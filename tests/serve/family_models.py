"""Tokenizers and tiny models of every family: the demo's vocabulary, with the family's marks as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from qkv_engine.text.tokenizer import Tokenizer

from ..doc_pages import ROOT
from .tool_writers import FORMS

DEMO = ROOT / "engine/assets/demo"
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_WORDS = ("assistant", "analysis", "final", "commentary", " to")
# Of Qwen and GLM, which are tokens and not special.
PLAIN_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)  # as Qwen's, GLM's
VOCAB_SIZE = 1088
TEMPLATE = """\
{%%- if tools %%}{{ '<|im_start|>system\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}{%% endif %%}
{%%- for message in messages %%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ (message.tool_calls or []) | tojson }}
    {{- '<|im_end|>\\n' }}
{%%- endfor %%}
{%%- if add_generation_prompt %%}{{ %s }}{%% endif %%}
{#- %s #}
"""


def tokenizer_json(name: str, *, with_marks: bool = True) -> dict[str, Any]:
    """tokenizer.json of a family: the demo's, without its marks of reasoning, and the family's marks."""
    found = json.loads((DEMO / "tokenizer.json").read_text())
    family = FORMS[name].family
    marks = [*(HARMONY + HARMONY_WORDS if name.startswith("gpt-oss") else ()), *(family.marks if with_marks else ())]
    for number, mark in enumerate(marks):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        is_special = mark not in (*HARMONY_WORDS, *PLAIN_MARKS)
        found["added_tokens"].append({"id": 1024 + number, "content": mark, "special": is_special, **flags})
    return found


def tokenizer_of(name: str, *, with_marks: bool = True) -> Tokenizer:
    """The tokenizer of a family, with or without tokens for the marks of its calls."""
    source = json.dumps(tokenizer_json(name, with_marks=with_marks))
    return Tokenizer(tokenizers.Tokenizer.from_str(source), {"eos_token": "<|im_end|>"}, template_of(name))


def template_of(name: str) -> str:
    """A chat template that is known as the family's."""
    is_harmony = name.startswith("gpt-oss")
    prompt = "'<|start|>assistant'" if is_harmony else "'<|im_start|>assistant\\n'"
    return TEMPLATE % (prompt, FORMS[name].template)


def make_model(folder: Path, name: str) -> None:
    """A folder of a model with random weights, for ``load_format="random"``."""
    folder.mkdir(parents=True)
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    ends = [2, 0]
    if name.startswith("gpt-oss"):
        ends += [1024 + HARMONY.index(mark) for mark in ("<|call|>", "<|return|>")]
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    for file, content in (
        ("config.json", config | {"num_key_value_heads": 1, "num_attention_heads": 1}),
        ("generation_config.json", {"eos_token_id": ends}),
        ("tokenizer.json", tokenizer_json(name)),
        ("tokenizer_config.json", tokens),
    ):
        (folder / file).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template_of(name))
    save_file({"unread": torch.zeros(1)}, folder / "model.safetensors")
