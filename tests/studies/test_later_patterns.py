"""The study of patterns of decoding: conversations, rows of logits, and the ladders that are compared."""

from __future__ import annotations

from contextlib import closing

import torch

from qkv_engine import Engine
from qkv_engine.loading import demo_folder
from qkv_engine.text.tokenizer import Tokenizer
from studies.later_patterns import BASE, LADDERS, TRUTH, Reading, as_table, conversations, log_probs


def test_a_conversation_has_its_turns_one_after_another() -> None:
    with closing(Tokenizer.from_folder(demo_folder())) as tokenizer:
        single = list(conversations(tokenizer, "addition:2", 4, 1, seed=3))
        (first, prompt), second = conversations(tokenizer, "addition:2", 2, 2, seed=3)
    assert first == single[0][0] + single[1][0] and prompt == single[0][1]
    assert second[0] == single[2][0] + single[3][0]


def test_rows_are_those_behind_the_prompt() -> None:
    ids = list(range(5, 305))
    with Engine(kv=LADDERS[TRUTH], device="cpu", dtype="float32", kv_memory="16MiB") as engine:
        found = log_probs(engine, ids, 100)
        other = log_probs(engine, ids[:200], 100)
    assert found.shape == (200, 1024)
    torch.testing.assert_close(other, found[:100], atol=0.02, rtol=0)  # chunks end elsewhere
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(200))


def test_the_table_compares_with_the_preset() -> None:
    better, worse = Reading(0.001, 0.0), Reading(0.003, 0.5)
    table = as_table({BASE: [Reading(0.002, 0.25)] * 2, "other": [better, worse]}, "title")
    assert table.cells[1] == ["other", "2.000", "25.000", "1 of 2"]
