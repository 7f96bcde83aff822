"""The families, in the order in which a chat template is tried: one whose marks are more is before others."""

from __future__ import annotations

from .family import CallFamily
from .gemma import Gemma
from .glm import Glm
from .gpt_oss import GptOss
from .hermes import Hermes
from .llama import Llama
from .mistral import Mistral, MistralList
from .pythonic import Pythonic
from .qwen_coder import QwenCoder

HERMES = Hermes()  # the form of calls that are forced on a model whose own form is not known
FAMILIES: tuple[CallFamily, ...] = (
    GptOss(),
    Gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    Gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    Glm(),
    QwenCoder(),
    HERMES,
    Mistral(),
    MistralList(),
    Pythonic(),
    Llama(),
)


def find_family(template: str | None) -> CallFamily | None:
    """The family of a chat template; None where calls have no form that is known."""
    return next((family for family in FAMILIES if template is not None and family.is_of(template)), None)
