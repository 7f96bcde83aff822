"""How a model marks its reasoning, by the tokens that its tokenizer has."""

from __future__ import annotations

from .channels import ChannelMarks, find_channels
from .reasoning import ReasoningMarks
from .tokenizer import Tokenizer

# Opening, closing, and a word that the reasoning begins with.
PAIRS = (
    ("<think>", "</think>", ""),  # Qwen3, DeepSeek, GLM, EXAONE, Hunyuan, SmolLM3, Granite 4 and their kin
    ("[THINK]", "[/THINK]", ""),  # Magistral and Ministral 3
    ("<seed:think>", "</seed:think>", ""),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),  # Command A
    ("<|channel>", "<channel|>", "thought"),  # Gemma 4
)


def find_marks(tokenizer: Tokenizer) -> ReasoningMarks | ChannelMarks | None:
    """The marks of a model that has a token for each; ``None`` for any other model."""
    channels = find_channels(tokenizer)
    if channels is not None:
        return channels
    for opening, closing, label in PAIRS:
        begin, end = tokenizer.token_of(opening), tokenizer.token_of(closing)
        if begin is not None and end is not None and begin != end:  # not both the unknown token
            return ReasoningMarks(begin, end, label=label)
    return None
