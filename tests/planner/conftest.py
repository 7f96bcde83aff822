"""Random models of each family, transformers' and ours, with weights that gradients can be taken of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import transformers

from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.loader import ModelSource, load_model, load_weights

from ..models import conftest as models

CPU = torch.device("cpu")

make_reference = models.make_reference


def plain_model(folder: Path) -> LlamaForCausalLM:
    """The model of a folder with weights that are not packed, for texts of up to 64 tokens."""
    config = load_model(str(folder), device=CPU).config.for_context(64)
    source = ModelSource("tiny", config, folder)
    return cast(LlamaForCausalLM, load_weights(source, dtype=torch.float32, device=CPU, pack=False).model)


@pytest.fixture
def pair(
    family: str, changes: dict, make_reference: Callable[..., transformers.PreTrainedModel], tmp_path: Path
) -> tuple[transformers.PreTrainedModel, LlamaForCausalLM]:
    """A random model of a family: transformers' and ours."""
    reference = make_reference(family, **changes)
    reference.save_pretrained(tmp_path)
    return reference, plain_model(tmp_path)
