"""The study of states' formats: its training model is the engine's, and its figures say what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from qkv_engine.models.loader import load_model
from studies import state_formats, train_hybrid
from studies.train_demo import export

from ..models.conftest import DenseBatch


def test_the_training_model_and_the_engine_agree(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = train_hybrid.Model(train_hybrid.CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05).copy_(parameter.to(torch.bfloat16))
    tokenizer = Tokenizer.from_file(str(train_hybrid.DEMO / "tokenizer.json"))
    export(model, tokenizer, tmp_path, train_hybrid.CONFIG)
    loaded = load_model(str(tmp_path), device=torch.device("cpu"))
    ids = torch.randint(0, 1024, (70,))
    with torch.inference_mode():
        theirs = model(ids[None])[0] @ model.embed_tokens.weight.T
        hidden = loaded.model(ids, torch.arange(70), DenseBatch(loaded.config.attention))
        mine = loaded.model.compute_logits(hidden)
    assert (mine.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < 1e-3


def test_a_step_of_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = train_hybrid.Model(train_hybrid.CONFIG | {"hidden_size": 32, "intermediate_size": 32})
    tokenizer = Tokenizer.from_file(str(train_hybrid.DEMO / "tokenizer.json"))
    batch = next(train_hybrid.rows(tokenizer, seed=1, number=2, length=64, max_facts=2, max_digits=2))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(4):
        loss, _ = train_hybrid.loss_and_right(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(parameter.grad is not None for parameter in model.parameters())


def test_more_bits_err_less_and_chance_errs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_formats, "DIM", 16)
    torch.manual_seed(0)
    names = ["int16", "float16", "bfloat16", "12 bits", "int8", "8 bits, at random", "8 bits, error fed back exactly"]
    found = {name: errors.mean().item() for name, errors in state_formats.simulate(names, 60, drift=False).items()}
    assert found["int16"] < found["float16"] < found["bfloat16"] < found["int8"] < found["8 bits, at random"]
    assert found["12 bits"] < found["8 bits, error fed back exactly"] < found["int8"]
