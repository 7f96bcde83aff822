"""The demo model for simulated caches: float32, one thread, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from qkv_engine.loading import demo_folder
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.loader import load_model
from qkv_engine.text.tokenizer import Tokenizer

HEAD_DIM = 128


@contextmanager
def demo_model() -> Iterator[tuple[LlamaForCausalLM, Tokenizer]]:
    """Model and tokenizer, which the end of the block closes."""
    torch.set_num_threads(1)  # waking another thread costs a model this small more than it gains
    model = load_model(str(demo_folder()), device=torch.device("cpu")).model
    assert isinstance(model, LlamaForCausalLM)
    with closing(Tokenizer.from_folder(demo_folder())) as tokenizer:
        yield model, tokenizer
